"""`retention` and `live_budget` of a request body: which tokens of this chat stay live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towerd.api.http import fields
from towerd.api.http.fields import INT32_MAX, Body
from towerd.engine.base import LiveBudget
from towerd.errors import InvalidRequest, NotSupported
from towerd.settings.config import RETENTIONS, UNBOUNDED, Config

_FIELDS = ("retention", "live_budget")


def parse_live(body: Body, config: Config, n_ctx: int) -> LiveBudget:
    """The budget of the request, else that of the daemon's settings.

    Raises InvalidRequest for an unknown policy, or a budget for a policy that has none."""
    if config.engine != "embedded":
        refuse_live(body)
    policy = fields.string(body, "retention", config.retention)
    if policy not in RETENTIONS:
        raise InvalidRequest(
            f"Field 'retention': there is no {policy[:40]!r}, take one of {', '.join(RETENTIONS)}"
        )
    tokens = fields.integer_in(body, ("live_budget",), 0, 1, INT32_MAX)
    if policy in UNBOUNDED:
        if tokens:
            bounded = ", ".join(name for name in RETENTIONS if name not in UNBOUNDED)
            raise InvalidRequest(
                f"Field 'live_budget' needs a policy that keeps to it: set 'retention' to one of "
                f"{bounded}"
            )
        return LiveBudget(policy)
    return LiveBudget(policy, tokens or config.live_budget or n_ctx // 2)


def refuse_live(body: Mapping[str, Any]) -> None:
    """Raises NotSupported if the request asks a llama-server for a policy."""
    for name in _FIELDS:
        if body.get(name) is not None:
            raise NotSupported(
                f"Field '{name}' needs the embedded engine: a llama-server keeps all of a chat, or "
                "shifts its context where it was started with --context-shift"
            )
