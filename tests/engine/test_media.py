"""A medium is evaluated as a whole: what is left of it in part is of no use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oracle import job_for, settle
from services import EmbeddedService, OpenService

from lab.models.vision import TOKENS_AN_IMAGE, make_projector, picture
from towerd.engine.base import Finish, GenerateRequest
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.errors import InvalidRequest
from towerd.media_ids import spans_of
from towerd.models.bundled import bundled_model
from towerd.tokens import Ids
from towerd.wire import Reply, Request

N_EMBD_TEXT = 64
"""Of the bundled model."""
OpenSeeing = Callable[..., AbstractAsyncContextManager[EmbeddedService]]


@pytest.fixture
def seeing(service_on: OpenService, tmp_path: Path) -> OpenSeeing:
    """A service that sees."""
    projector = tmp_path / "mmproj.gguf"
    make_projector(projector, N_EMBD_TEXT)
    flags = ("--mmproj", str(projector), "--no-warmup")

    def open_it(**settings: Any) -> AbstractAsyncContextManager[EmbeddedService]:
        return service_on(bundled_model(), llama_server_args=flags, anticipate=False, **settings)

    return open_it


@dataclass(frozen=True)
class Seen:
    ids: Ids
    """Of the prompt."""
    finish: Finish


def request_for(service: EmbeddedService, seed: int, **fields: Any) -> GenerateRequest:
    """A question about a picture."""
    url = "data:image/png;base64," + picture(seed)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8}
    assert service.engine.wire is not None
    wire = Request(service.engine.wire.model, "chat", json.dumps(body).encode())
    settings: dict[str, Any] = {"media": wire.media(0), "reply": Reply(wire, 0), "n_predict": 8}
    return GenerateRequest(ids=wire.prompts[0], **(settings | fields))


async def look(service: EmbeddedService, seed: int, **fields: Any) -> Seen:
    request = request_for(service, seed, **fields)
    finish = await service.sessions.run_quietly(request)
    assert finish is not None
    return Seen(request.ids, finish)


@pytest.mark.parametrize("n_left", range(TOKENS_AN_IMAGE + 1))
async def test_rows_of_a_part(seeing: OpenSeeing, n_left: int) -> None:
    """The rows of the picture's last tokens, and of what follows, are lost: it is evaluated again
    as a whole, from where it begins."""
    async with seeing(warm_bytes=0) as service:
        first = await look(service, 1)
        await settle(service)
        service.engine.forget_live()
        (start, end) = spans_of(first.ids)[0]
        scope = GenerateRequest(ids=first.ids).scope
        service.store.insert(first.ids, scope, [start + n_left, len(first.ids)])
        for node in service.store.nodes():
            if node.p0 >= start + n_left:
                service.store.rows.drop_hot(node)
        again = await look(service, 1)
        assert again.finish.ids == first.finish.ids
        reuse, stats = again.finish.reuse, service.engine.stats()
        assert (reuse.live, reuse.hot) == (0, end if n_left == TOKENS_AN_IMAGE else start)
        assert stats["media_encoded"] == (1 if n_left == TOKENS_AN_IMAGE else 2)


async def test_without_the_picture(seeing: OpenSeeing) -> None:
    """A prompt that is evaluated in the background ends before a picture whose rows are gone; with
    its rows it continues behind it. Any other is told."""
    async with seeing() as service:
        request = request_for(service, 1)
        (start, _) = spans_of(request.ids)[0]
        quiet = GenerateRequest(ids=request.ids, n_predict=0, background=True)
        finish = await service.sessions.run_quietly(quiet)
        assert finish is not None
        assert finish.n_cached == start
        with pytest.raises(InvalidRequest, match="does not "):
            await look(service, 1, media=())
        await look(service, 1)
        assert len((await look(service, 1, media=())).finish.ids) == 8
        finish = await service.sessions.run_quietly(quiet)
        assert finish is not None
        assert finish.n_cached >= len(request.ids) - 1
        assert service.engine.stats()["media_encoded"] == 1


async def test_other_streams_do_not_wait(seeing: OpenSeeing) -> None:
    """A picture whose client left while others were encoded is not encoded."""
    async with seeing() as service:
        ready: list[Job] = []
        for is_left in (True, False):
            request = request_for(service, 1)
            job = job_for(request, media=spans_of(request.ids))
            job.seq = LiveSeq(0, request.scope, request.ids, n=job.media[0][0])
            job.phase, job.cancelled = JobPhase.LOADING, is_left
            service.engine.media.encode(job, lambda job, _: ready.append(job))
        await asyncio.to_thread(service.engine.media.close)
        assert [job.cancelled for job in ready] == [False]


async def test_a_model_without_a_projector(seeing: OpenSeeing, service_on: OpenService) -> None:
    """A chat with pictures stays in the store, and is not evaluated as if they were text."""
    async with seeing() as service:
        seen = await look(service, 1)
    async with service_on(bundled_model()) as service:
        assert (service.store.session_ids(seen.finish.session) < 0).sum() == TOKENS_AN_IMAGE
        with pytest.raises(InvalidRequest, match="--mmproj"):
            await service.sessions.run_quietly(GenerateRequest(ids=seen.ids, n_predict=0))
