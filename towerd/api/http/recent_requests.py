"""The requests that were answered last, of all tenants: reuse, and how fast."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from aiohttp import web

from towerd.engine.base import Finish
from towerd.store.tree.scope import tenant_of

REQUESTS_MAX = 4096
"""Requests that are remembered, in some 4 MB: hours of a person's, an hour of a few agents'."""


def speeds_json(ttft_s: float | None, tokens_per_second: float | None) -> dict[str, float | None]:
    """How fast a request is, or was; null for what is not known."""
    return {
        "ttft_ms": None if ttft_s is None else round(ttft_s * 1e3, 3),
        "tokens_per_second": None if tokens_per_second is None else round(tokens_per_second, 3),
    }


class RecentRequests:
    """A ring of answered requests: their facts, without text. Belongs to the event loop."""

    def __init__(self) -> None:
        self._ring: deque[dict[str, Any]] = deque(maxlen=REQUESTS_MAX)

    def add(self, scope: str, finish: Finish, ttft_s: float | None) -> None:
        """A request of `scope` ended now. ttft_s: from a parsed request to its first token; None if
        there was none."""
        reuse, timings = finish.reuse, finish.timings
        tiers = ("live", "hot", "warm", "prefill", "cold")
        self._ring.append(
            {
                "finished": time.time(),
                "session": finish.session,
                "scope": scope,
                "stop": finish.stop,
                "reuse": {name: getattr(reuse, name) for name in tiers},
                "generated": timings.predicted_n,
                **speeds_json(ttft_s, timings.tokens_per_second),
            }
        )

    def since(self, moment: float, scope: str | None, limit: int) -> list[dict[str, Any]]:
        """Those of a tenant (None: of all) that ended after `moment` (Unix time), the newest first."""
        found: list[dict[str, Any]] = []
        for each in reversed(self._ring):
            if each["finished"] <= moment or len(found) == limit:
                break
            if scope is None or tenant_of(each["scope"]) == tenant_of(scope):
                found.append(each)
        return found


RECENT: web.AppKey[RecentRequests] = web.AppKey("recent", RecentRequests)
