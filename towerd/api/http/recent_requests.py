"""The requests that were answered last, of all tenants: reuse, how fast, and why not more was found."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from towerd.api.http.request_log import why_evaluated
from towerd.engine.base import Finish
from towerd.errors import NotFound
from towerd.sessions.divergence import Divergence
from towerd.store.tree.scope import tenant_of

REQUESTS_MAX = 4096
"""Requests that are remembered, in some 8 MB: hours of a person's, an hour of a few agents'."""
ID_CHARS_MIN = 4
"""Of an id, what its beginning must have to name a request."""
_ID_PREFIX = "chatcmpl-"
_TIERS = ("live", "hot", "warm", "prefill", "cold")


def speeds_json(ttft_s: float | None, tokens_per_second: float | None) -> dict[str, float | None]:
    """How fast a request is, or was; null for what is not known."""
    return {
        "ttft_ms": None if ttft_s is None else round(ttft_s * 1e3, 3),
        "tokens_per_second": None if tokens_per_second is None else round(tokens_per_second, 3),
    }


@dataclass(slots=True)
class RecentRequest:
    """A choice of a request that was answered."""

    id: str
    """The completion's, which its client was told."""
    scope: str
    finish: Finish
    """Without the ids of the reply, and what it was sampled from."""
    ttft_s: float | None
    """From a parsed request to its first token; None if there was none."""
    divergence: Divergence | None = None
    """Why not more of its prompt was found; set once it is known. It has text of two conversations."""
    finished_s: float = field(default_factory=time.time)
    """Unix time."""

    def is_of(self, scope: str | None) -> bool:
        """Whether it is a tenant's; None: anybody's."""
        return scope is None or tenant_of(self.scope) == tenant_of(scope)

    def __post_init__(self) -> None:
        self.finish = replace(self.finish, ids=(), served=None)

    @property
    def why(self) -> str:
        """Why tokens of its prompt were evaluated, without text; "" if none were."""
        if self.divergence is not None:
            return self.divergence.phrase(with_text=False)
        return why_evaluated(self.finish.reuse)

    def json(self) -> dict[str, Any]:
        """Its facts, without text."""
        timings = self.finish.timings
        return {
            "id": self.id,
            "finished": self.finished_s,
            "session": self.finish.session,
            "scope": self.scope,
            "stop": self.finish.stop,
            "reuse": {name: getattr(self.finish.reuse, name) for name in _TIERS},
            "why": self.why,
            "generated": timings.predicted_n,
            **speeds_json(self.ttft_s, timings.tokens_per_second),
        }


class RecentRequests:
    """A ring of answered requests. Belongs to the event loop."""

    def __init__(self) -> None:
        self._ring: deque[RecentRequest] = deque(maxlen=REQUESTS_MAX)

    def extend(self, answered: Iterable[RecentRequest]) -> None:
        """These ended now."""
        self._ring.extend(answered)

    def since(
        self, moment: float, scope: str | None, limit: int, session: str | None = None
    ) -> list[RecentRequest]:
        """Those of a tenant (None: of all), and of a session if one is named, that ended after `moment` (Unix
        time), the newest first."""
        found: list[RecentRequest] = []
        for each in reversed(self._ring):
            if each.finished_s <= moment or len(found) == limit:
                break
            if each.is_of(scope) and session in (None, each.finish.session):
                found.append(each)
        return found

    def find(self, name: str, scope: str | None) -> RecentRequest:
        """The newest one of a tenant (None: of any) whose id is `name`, or begins so, with or without
        what all ids begin with. Raises NotFound."""
        wanted = name.removeprefix(_ID_PREFIX)
        if len(wanted) >= ID_CHARS_MIN:
            named = [
                each
                for each in reversed(self._ring)
                if each.is_of(scope) and each.id.removeprefix(_ID_PREFIX).startswith(wanted)
            ]
            if named:  # of the choices of one request, the first is explained
                same = (each for each in named if each.id == named[0].id and each.divergence)
                return next(same, named[0])
        raise NotFound(f"there is no request {name[:50]!r} among the last {REQUESTS_MAX:,}")


def short_id(id: str) -> str:
    """How the log names a request."""
    return id.removeprefix(_ID_PREFIX)[:8]


RECENT: web.AppKey[RecentRequests] = web.AppKey("recent", RecentRequests)
