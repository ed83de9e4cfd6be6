"""POST /api/pull: fetches what `towerctl models get` fetches, with Ollama's lines of progress. For the owner only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api.http.access import require_admin
from towerd.api.http.body import read_bytes
from towerd.api.http.keys import GATE
from towerd.api.http.reply import json_reply
from towerd.api.http.sse import event_stream
from towerd.api.http.translation import TRANSLATION, Translation
from towerd.api.ollama.asked import asked_of, without_latest
from towerd.errors import Forbidden, ModelError, NotFound
from towerd.models.known import KNOWN, KnownModel

HUB_PREFIXES = ("hf.co/", "huggingface.co/")
"""Ollama's names of the Hugging Face Hub's repositories begin so."""
SUCCESS = {"status": "success"}
NOT_SERVED = (
    "fetched, and not among the models that this daemon serves: name it with -m at the next start"
)
Line: TypeAlias = dict[str, Any]
Lines: TypeAlias = AsyncGenerator[Line, None]
IsServed = Callable[[web.Request, str], bool]
"""Whether a model of this name is here already."""
Settle = Callable[[web.Request, Path], Awaitable[bool]]
"""Called with the file that was fetched; returns whether it is served now."""


def pulling(is_served: IsServed, settle: Settle) -> Handler:
    """The handler, of a daemon of one model or of several."""

    async def handle(request: web.Request) -> web.StreamResponse:
        asked = await asked_of(request, await read_bytes(request))
        name, is_stream = without_latest(asked.model_name()), asked.is_streamed()
        if is_served(request, asked.model_name()) or is_served(request, name):
            lines = _nothing_to_do()
        else:
            require_admin(request)
            lines = _pulled(request, Pull(name), settle)
        if is_stream:
            return await _stream(request, lines)
        async with aclosing(lines):
            async for _ in lines:
                pass
        return json_reply(SUCCESS)

    return handle


async def _stream(request: web.Request, lines: Lines) -> web.StreamResponse:
    request[TRANSLATION] = AsTheyAre(request.path)
    async with event_stream(request) as stream, aclosing(lines):
        async for line in lines:
            await stream.send([line])
    return stream.response


async def _nothing_to_do() -> Lines:
    yield SUCCESS


async def _pulled(request: web.Request, pull: Pull, settle: Settle) -> Lines:
    yield {"status": "pulling manifest"}
    async with aclosing(pull.lines()) as lines:
        async for line in lines:
            yield line
    if not await settle(request, pull.path):
        yield {"status": NOT_SERVED}
    yield SUCCESS


class AsTheyAre(Translation):
    """Of events whose objects are Ollama's already."""

    def lines(self, event: dict[str, Any]) -> Iterable[dict[str, Any]]:
        return [event]

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        return reply


class PullCancelled(ModelError):
    """Whoever wanted the model has left."""


class Pull:
    """Fetches one model, on a thread of its own."""

    def __init__(self, name: str) -> None:
        """Raises NotFound for a name that is none of a model to fetch, Forbidden for one whose terms a
        person has to accept first."""
        self.path = Path()
        """The model's file, once `lines` has ended."""
        self._known = _known(name)
        self._name = name
        # Ollama's own program shows a part of it, and takes no shorter one.
        self._digest = self._known.sha256 if self._known else sha256(name.encode()).hexdigest()
        self._total = 0
        self._completed = 0
        self._is_left = threading.Event()
        self._lines: asyncio.Queue[Line | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def lines(self) -> Lines:
        """How far it is. Raises ModelError; then nothing was fetched."""
        fetching = asyncio.create_task(asyncio.to_thread(self._fetch))
        fetching.add_done_callback(lambda _: self._lines.put_nowait(None))
        try:
            while (line := await self._lines.get()) is not None:
                yield line
            self.path = await fetching
        finally:
            self._is_left.set()

    def _fetch(self) -> Path:
        if self._known is not None:
            from towerd.models.fetch import Fetch

            self._begin(self._known.title, self._known.bytes_to_fetch)
            return Fetch(self._known, progress=self._show).run()
        from towerd.models.hub.choice import RepoName
        from towerd.models.hub.download import Watcher, fetch

        return fetch(
            RepoName.parse(_repo(self._name)), watcher=Watcher(self._begin, self._add)
        ).path

    def _begin(self, title: str, n_bytes: int) -> None:
        self._total = n_bytes

    def _add(self, n_bytes: int) -> None:
        self._show(self._completed + n_bytes)

    def _show(self, completed: int) -> None:
        if self._is_left.is_set():
            raise PullCancelled("The client that wanted the model has left.")
        self._completed = completed
        line = {
            "status": f"pulling {self._name}",
            "digest": f"sha256:{self._digest}",
            "total": self._total,
            "completed": completed,
        }
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line)


def _repo(name: str) -> str:
    for prefix in HUB_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _known(name: str) -> KnownModel | None:
    """The model that is known by this name; None: it is one of the Hub. Raises NotFound, Forbidden."""
    known = KNOWN.get(name)
    if known is None and "/" not in _repo(name):
        raise NotFound(
            f"there is no model {name[:200]!r} to pull: take one of {', '.join(KNOWN)}, or hf.co/OWNER/REPO:QUANT "
            "of the Hugging Face Hub"
        )
    if known is not None and known.terms:
        raise Forbidden(
            f"{known.title} may be used under the {known.licence} only ({known.terms}): accept them with "
            f"towerd models get {known.name} --yes"
        )
    return known


# ---- of a daemon of one model -------------------------------------------------------------------


def _is_the_model(request: web.Request, name: str) -> bool:
    info = request.app[GATE].open().engine.info
    return name in (info.alias, *info.aliases)


async def _is_its_file(request: web.Request, path: Path) -> bool:
    served = request.app[GATE].open().engine.info.path
    return await asyncio.to_thread(lambda: path.resolve() == Path(served).resolve())


post_pull = pulling(_is_the_model, _is_its_file)
