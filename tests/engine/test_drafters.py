"""Heads in files of their own (EAGLE-3, DFlash, DSpark, Gemma 4's assistant): replies are those of a daemon
without them, right guesses are taken, and a head that was made for another model is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from drafters import TARGETS, Guesses, make_drafter, make_target, words
from heads import make_head_gguf
from programs import run_python
from services import EmbeddedService, OpenService
from speculating import EVEN, Said, drafted, gist, say
from vision_model import make_projector, picture

from towerd.engine.base import GenerateRequest, encode
from towerd.errors import ConfigError
from towerd.tokens import Ids
from towerd.wire import Reply, Request

REPLY = 40
ASKED: dict[str, Any] = {"n_predict": REPLY, "ignore_eos": True, "cache_prompt": True}
PAIRS = {
    "draft-eagle3": "llama",
    "draft-eagle3 hybrid": "qwen35",
    "draft-dflash": "llama",
    "draft-dflash hybrid": "qwen35",
    "draft-dspark": "llama",
    "draft-mtp": "gemma4",
}
"""The model's architecture for each kind of head."""
N_MAX = {"draft-dflash": 7, "draft-dspark": 3}
Opened: TypeAlias = Callable[..., AbstractAsyncContextManager[EmbeddedService]]


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models, by architecture."""
    folder = tmp_path_factory.mktemp("targets")
    found = {arch: folder / f"{arch}.gguf" for arch in TARGETS}
    for arch, path in found.items():
        make_target(path, arch)
    return found


@pytest.fixture
def opened(service_on: OpenService, targets: dict[str, Path], tmp_path: Path) -> Opened:
    """`async with opened(pair, guesses)`: a service on one store; guesses: "" without speculation."""

    def on(
        pair: str, guesses: Guesses | str = "right", *flags: str, **settings: Any
    ) -> AbstractAsyncContextManager[EmbeddedService]:
        kind = pair.split()[0]
        if guesses in ("right", "random"):
            path = tmp_path / f"{kind} {guesses}.gguf"
            make_drafter(path, kind, guesses)  # type: ignore[arg-type]
            n_max = str(N_MAX.get(kind, 4))
            flags += ("-md", str(path), "--spec-type", kind, "--spec-draft-n-max", n_max)
        fixed = {"store_dir": tmp_path / "store", "ctx_size": 1024, "anticipate": False}
        given = {"llama_server_args": flags} | fixed | EVEN | settings
        return service_on(targets[PAIRS[pair]], **given)

    return on


@pytest.fixture(params=list(PAIRS))
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    assert (await asyncio.to_thread(service.store.verify)).ok


async def chat(service: EmbeddedService) -> list[Said]:
    """A chat that continues, is regenerated, is edited, and two at once."""
    first = words(90, 1)
    said = [await say(service, first, **ASKED)]
    second = first + said[0]["ids"] + words(20, 2)
    said.append(await say(service, second, **ASKED))
    said.append(await say(service, second, **ASKED))
    said.append(await say(service, first[:60] + words(30, 3), **ASKED))
    said += await asyncio.gather(
        say(service, second + said[1]["ids"] + words(12, 5), **ASKED),
        say(service, words(70, 4), **ASKED),
    )
    return said


async def test_right_guesses_are_taken(opened: Opened, pair: str, tmp_path: Path) -> None:
    """All of them, which takes the states and rows of the right tokens; also after a restart."""
    async with opened(pair, "", store_dir=tmp_path / "other") as service:
        without = await chat(service)
    async with opened(pair, "right") as service:
        said = await chat(service)
        await settle(service)
    async with opened(pair, "right") as service:
        more = words(90, 1) + said[0]["ids"] + words(24, 6)
        said.append(await say(service, more, **ASKED))
    for one, other in zip(said, without, strict=False):
        assert gist(one) == gist(other)
        assert drafted(other) == (0, 0)
    for each in said:
        n, n_right = drafted(each)
        assert n == n_right >= REPLY // 2


async def test_wrong_guesses_leave_nothing(opened: Opened, pair: str, tmp_path: Path) -> None:
    """The reply is the same, and so are the rows: the chat continues from them after a restart."""
    async with opened(pair, "", store_dir=tmp_path / "other") as service:
        without = await chat(service)
    async with opened(pair, "random") as service:
        said = await chat(service)
        await settle(service)
    for one, other in zip(said, without, strict=True):
        assert gist(one) == gist(other)
        n, n_right = drafted(one)
        assert n_right < n
    async with opened(pair, "random") as service:
        assert [each["ids"] for each in await chat(service)] == [each["ids"] for each in said]


@pytest.mark.parametrize("kind", ["draft-eagle3", "draft-dflash"])
async def test_replies_that_give_way_to_each_other(opened: Opened, kind: str) -> None:
    small = {"ctx_size": 512, "live_tokens": 512}
    prompts = [words(40, i) for i in range(4)]
    long = ASKED | {"n_predict": 160}
    async with opened(kind, "right", **small) as service:
        said = await asyncio.gather(*(say(service, prompt, **long) for prompt in prompts))
        assert service.engine.stats()["preemptions"]
        for prompt, each in zip(prompts, said, strict=True):
            assert each["ids"] == _after(prompt, 160)
        await settle(service)


def _after(prompt: list[int], n: int) -> list[int]:
    """What a model says behind a prompt."""
    circle = words(148, 0)
    at = circle.index(prompt[-1])
    return [circle[(at + 1 + i) % len(circle)] for i in range(n)]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from drafters import words
from services import opener
from speculating import EVEN, say

async def main(kind, model, head, folder):
    flags = ("-md", head, "--spec-type", kind)
    settings = {"ctx_size": 1024, "anticipate": False, "llama_server_args": flags} | EVEN
    async with opener(Path(folder))(Path(model), **settings) as service:
        said = await say(service, words(60, 1), n_predict=40, ignore_eos=True, cache_prompt=True)
        await service.engine.settle()
        await asyncio.to_thread(service.tiers.flush)
        if os.fork() == 0:  # the last words of one that is killed may be lost
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        await asyncio.sleep(60)
"""


def request_for(service: EmbeddedService, before: list[int], after: list[int]) -> GenerateRequest:
    """A prompt with a picture in the middle."""
    assert service.engine.wire is not None
    model = service.engine.wire.model
    url = "data:image/png;base64," + picture(1)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    seen = Request(model, "chat", json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    media = seen.media(0)
    body = {"prompt": before, "temperature": 0, "n_predict": REPLY, "ignore_eos": True}
    ids = [*before, *media[0].ids.tolist(), *after]
    reply = Reply(Request(model, "completion", encode(body)), 0)
    return GenerateRequest(ids=_ids(ids), reply=reply, n_predict=REPLY, media=media)


def _ids(ids: list[int]) -> Ids:
    import numpy as np

    return np.array(ids, np.int32)


@pytest.mark.parametrize("pair", ["draft-eagle3", "draft-dflash", "draft-mtp"])
async def test_drafts_behind_pictures(opened: Opened, pair: str, tmp_path: Path) -> None:
    """The reply is that without drafts, and guesses are right again from what follows the picture."""
    projector = tmp_path / "mmproj.gguf"
    make_projector(projector, 128)
    flags = ("--mmproj", str(projector), "--no-warmup")
    said = {}
    for guesses in ("", "random", "right"):
        async with opened(pair, guesses, *flags, store_dir=tmp_path / f"store {guesses}") as service:
            request = request_for(service, words(30, 1), words(12, 2))
            finish = await service.sessions.run_quietly(request)
            assert finish is not None
            said[guesses] = list(finish.ids)
            n, n_right = request.reply.drafted if request.reply is not None else (0, 0)
            assert service.engine.stats()["media_evaluated"] == 1
    assert said[""] == said["random"] == said["right"] == _after(words(12, 2), REPLY)
    assert n == n_right >= REPLY // 2
