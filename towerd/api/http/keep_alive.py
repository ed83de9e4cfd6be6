"""KeepAlive: how long a model stays loaded after the requests that generate with it, as the last of them said."""

from __future__ import annotations

from aiohttp import web

STAYS: web.RequestKey[float | None] = web.RequestKey("stays")
"""Seconds for which a request wants the model to stay loaded after it; absent or None: it says nothing."""
_PATHS = frozenset(
    "/completion /completions /v1/completions /chat/completions /v1/chat/completions /infill "
    "/responses /v1/responses /v1/messages /audio/transcriptions /v1/audio/transcriptions "
    "/embedding /embeddings /v1/embeddings /rerank /reranking /v1/rerank /v1/reranking "
    "/api/chat /api/generate /api/embed /api/embeddings".split()
)
_SESSIONS, _CHAT = "/towerd/v1/sessions/", "/chat"


def generates(request: web.Request) -> bool:
    """Whether this asks a model to generate, to embed or to rank: what else uses it, such as /tokenize, does not say
    how long it stays."""
    path = request.path
    if request.method != "POST":
        return False
    return path in _PATHS or (path.startswith(_SESSIONS) and path.endswith(_CHAT))


class KeepAlive:
    """What the requests of one model said: of those that were accepted, the one that began last counts. Event loop
    only."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        """Unload the model so long after it was used last; None: after the daemon's or the model's own time."""
        self._n_begun = self._said_by = 0

    def begin(self) -> int:
        """A request begins; returns its number, for `say`."""
        self._n_begun += 1
        return self._n_begun

    def say(self, number: int, seconds: float | None) -> bool:
        """A request was accepted, which says this; returns whether that changes anything."""
        if number < self._said_by:
            return False
        is_new = seconds != self.seconds
        self._said_by, self.seconds = number, seconds
        return is_new

    def forget(self) -> None:
        """The model is unloaded: what was said is done."""
        self.seconds = None
