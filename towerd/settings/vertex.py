"""What Google's Vertex AI says, through variables, to the container of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from towerd.errors import ConfigError

_PATH = re.compile(r"(/[-A-Za-z0-9._~:@]+)+")


@dataclass(frozen=True, slots=True)
class Vertex:
    """Where Vertex AI calls this container, on `port` alone. Its network lets nobody else in, and its
    callers have no keys but Google's."""

    port: int
    predict: str
    """The path of predictions."""
    health: str
    """The path of health checks besides /health; empty: none."""


def vertex_of(env: Mapping[str, str]) -> Vertex | None:
    """The settings of these variables; None: this is no container of Vertex AI. Raises ConfigError."""
    if env.get("AIP_MODE") != "PREDICTION":
        return None
    port = env.get("AIP_HTTP_PORT") or "8080"
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(f"AIP_HTTP_PORT is a port, not {port!r}.")
    predict = _path(env, "AIP_PREDICT_ROUTE") or "/predict"
    return Vertex(int(port), predict, _path(env, "AIP_HEALTH_ROUTE"))


def _path(env: Mapping[str, str], name: str) -> str:
    text = env.get(name) or ""
    path = f"/{text}" if text and not text.startswith("/") else text
    if path and not _PATH.fullmatch(path):
        raise ConfigError(f"{name} is a path of letters, digits and -._~:@/, not {text[:80]!r}.")
    return path
