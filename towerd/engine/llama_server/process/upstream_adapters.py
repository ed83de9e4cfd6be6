"""The LoRA adapters of a llama-server, and the scopes of requests that name others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from towerd.errors import InvalidRequest
from towerd.store.tree.scope import adapters_of, scope_of

ENTRIES_MAX = 8192


class UpstreamAdapters:
    """See `towerd.engine.base.AdapterSet`. The scales in force at the start are part of the row
    identity; a request under other ones has them in its scope."""

    def __init__(self, listed: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        """listed: GET /lora-adapters at the start. names: what identifies each adapter's file."""
        self._names = tuple(names)
        self._first = self._scales = _scales_of(listed)

    def reread(self, listed: Sequence[Mapping[str, Any]]) -> None:
        """Take the scales that llama-server has now."""
        self._scales = _scales_of(listed)

    def scope(self, tenant: str, asked: object = None) -> str:
        """The scope of a request of `tenant`; asked: its field `lora`. Raises InvalidRequest."""
        if asked is not None and not isinstance(asked, list):
            raise InvalidRequest("'lora' must be an array of objects with 'id' and 'scale' fields")
        scales = self._read(asked) if asked else self._scales
        if scales == self._first:
            return tenant
        named = (
            f"{name}@{np.float32(scale)}"
            for name, scale in zip(self._names, scales, strict=True)
            if scale
        )
        return scope_of(tenant, ",".join(named) or "none")

    def has(self, scope: str) -> bool:
        """Whether the adapters of a scope are loaded."""
        return all(name in self._names for name in _named(scope))

    def entries(self, scope: str) -> list[dict[str, Any]]:
        """The field `lora` of a request of `scope`; empty: there are no adapters. Each request names
        its scales, whatever those of all requests have become since it was parsed."""
        scales: Sequence[float] = self._first
        if adapters_of(scope):
            named = _named(scope)
            scales = [float(named.get(name, 0.0)) for name in self._names]
        return [{"id": i, "scale": scale} for i, scale in enumerate(scales)]

    def _read(self, asked: Sequence[Any]) -> tuple[float, ...]:
        """One scale for each adapter, 0 for those that are not named."""
        if len(asked) > ENTRIES_MAX:
            raise InvalidRequest(f"at most {ENTRIES_MAX} LoRA adapters can be named")
        scales = [0.0] * len(self._names)
        for entry in asked:
            number, scale = (
                (entry.get("id"), entry.get("scale", 0.0))
                if isinstance(entry, dict)
                else (None, 0.0)
            )
            if not isinstance(number, int) or not isinstance(scale, int | float):
                continue  # as llama-server
            if not math.isfinite(np.float32(scale)):
                raise InvalidRequest("the scale of a LoRA adapter must be a finite number")
            if 0 <= number < len(scales):
                scales[number] = float(scale)
        return tuple(scales)


def _named(scope: str) -> dict[str, str]:
    """The scale of each adapter that a scope names."""
    return dict(part.split("@") for part in adapters_of(scope).split(",") if "@" in part)


def _scales_of(listed: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    return tuple(float(each["scale"]) for each in listed)
