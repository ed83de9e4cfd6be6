"""Heads in files of their own (EAGLE-3, DFlash, DSpark, Gemma 4's assistant): replies are those of a daemon
without them, right guesses are taken, and a head that was made for another model is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from drafters import BACK, TARGETS, Guesses, after, make_drafter, make_target, words
from programs import run_python
from services import EmbeddedService, OpenService
from speculating import EVEN, Said, drafted, gist, say

from lab.models.vision import make_projector, picture
from towerd.engine.base import GenerateRequest, encode
from towerd.errors import ConfigError
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
            make_drafter(path, kind, guesses)
            n_max = str(N_MAX.get(kind, 4))
            flags = ("-md", str(path), "--spec-type", kind, "--spec-draft-n-max", n_max, *flags)
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
        if "dflash" in pair and each["timings"]["prompt_n"] < BACK:
            continue  # it looks at rows that the store has not
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
            assert each["ids"] == after(prompt, 160)
        await settle(service)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from drafters import words
from services import opener
from speculating import EVEN, say

async def main(model, head, folder):
    flags = ("-md", head, "--spec-type", "draft-eagle3")
    settings = {"ctx_size": 1024, "anticipate": False, "llama_server_args": flags} | EVEN
    async with opener(Path(folder))(Path(model), **settings) as service:
        said = await say(service, words(60, 1), n_predict=40, ignore_eos=True, cache_prompt=True)
        await service.engine.settle()
        await asyncio.to_thread(service.tiers.flush)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_daemon_that_was_killed(
    opened: Opened, targets: dict[str, Path], tmp_path: Path
) -> None:
    """The chat is there with its rows, without a guess among them; guesses are right from what is new."""
    kind = "draft-eagle3"
    make_drafter(tmp_path / "head.gguf", kind, "random")
    run_python(KILLED, str(targets["llama"]), str(tmp_path / "head.gguf"), str(tmp_path), status=-9)
    async with opened(kind, "right") as service:
        prompt = words(60, 1) + after(words(60, 1), REPLY) + words(12, 2)
        said = await say(service, prompt, **ASKED)
        assert said["ids"] == after(prompt, REPLY)
        assert said["timings"]["cache_n"] >= 60 + REPLY - 1
        n, n_right = drafted(said)
        assert n == n_right >= REPLY // 2


MISFITS = """
import asyncio, sys
from pathlib import Path
from drafters import make_misfits
from services import opener
from towerd.errors import ConfigError

async def main(folder):
    for name, misfit in make_misfits(folder).items():
        flags = {"llama_server_args": misfit.flags, "ctx_size": 256}
        try:
            async with opener(folder)(misfit.model, **flags):
                print(name, "was taken", flush=True)
        except ConfigError as error:
            found = str(error)
            print(name, "is refused" if misfit.said in found else found, flush=True)
    print("end")

asyncio.run(main(Path(sys.argv[1])))
"""


def test_misfits_are_refused(tmp_path: Path) -> None:
    """In a sentence, before llama.cpp reads behind its buffers."""
    told = run_python(MISFITS, str(tmp_path)).splitlines()
    assert [line for line in told if not line.endswith("is refused")] == ["end"]


def request_for(service: EmbeddedService, before: list[int], after: list[int]) -> GenerateRequest:
    """A prompt with a picture in the middle."""
    assert service.engine.wire is not None
    model = service.engine.wire.model
    url = "data:image/png;base64," + picture(1)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    seen = Request(
        model, "chat", json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    )
    media = seen.media(0)
    body = {"prompt": before, "temperature": 0, "n_predict": REPLY, "ignore_eos": True}
    ids = [*before, *media[0].ids.tolist(), *after]
    reply = Reply(Request(model, "completion", encode(body)), 0)
    return GenerateRequest(ids=np.array(ids, np.int32), reply=reply, n_predict=REPLY, media=media)


@pytest.mark.parametrize("pair", ["draft-eagle3", "draft-dflash", "draft-mtp"])
async def test_drafts_behind_pictures(opened: Opened, pair: str, tmp_path: Path) -> None:
    """The reply is that without drafts, and guesses are right again from what follows the picture."""
    projector = tmp_path / "mmproj.gguf"
    make_projector(projector, 128)
    flags = ("--mmproj", str(projector), "--no-warmup")
    said, drafts = {}, {}
    for guesses in ("", "random", "right"):
        async with opened(
            pair, guesses, *flags, store_dir=tmp_path / f"store {guesses}"
        ) as service:
            request = request_for(service, words(30, 1), words(12, 2))
            finish = await service.sessions.run_quietly(request)
            assert finish is not None
            said[guesses] = list(finish.ids)
            assert request.reply is not None
            drafts[guesses] = request.reply.drafted
            assert service.engine.stats()["media_evaluated"] == 1
    assert said == dict.fromkeys(said, after(words(12, 2), REPLY))
    n, n_right = drafts["right"]
    assert n == n_right >= REPLY // 2


async def test_flags_of_drafts(opened: Opened, tmp_path: Path) -> None:
    """What follows from the head's file need not be said."""
    make_drafter(tmp_path / "head.gguf", "draft-eagle3")
    few = ("--spec-draft-n-max", "2", "--spec-draft-n-min", "2", "--spec-draft-p-min", "0.5")
    flags = (*few, "--spec-draft-type-k", "q8_0", "--spec-draft-threads", "1")
    async with opened(
        "draft-eagle3", "right", *flags, "--no-spec-draft-backend-sampling"
    ) as service:
        n, n_right = drafted(await say(service, words(30, 1), **ASKED))
        assert n == n_right >= REPLY // 2


async def test_drafts_that_are_taken_by_chance(opened: Opened) -> None:
    """As llama-server's flags for benchmarks ask for: whatever the model says, the same ones for one seed."""
    rates, never = ("--spec-synth-rates", "0.9,0.8,0.7,0.6"), ("--spec-synth-len", "1")
    async with opened("draft-eagle3", "random", "--spec-synth-rates", "1,1,1,1") as service:
        said = await say(service, words(30, 1), **ASKED)
        n, n_right = drafted(said)
        assert n == n_right >= REPLY * 3 // 4
        assert said["ids"] != after(words(30, 1), REPLY)
    async with opened("draft-eagle3", "random", *rates) as service:
        found = []
        for seed in (1, 1, 2):
            again = ASKED | {"seed": seed, "cache_prompt": False}
            found.append(await say(service, words(30, 1), **again))
    assert found[0]["ids"] == found[1]["ids"] != found[2]["ids"]
    n, n_right = drafted(found[0])
    assert 0 < n_right < n
    async with opened("draft-eagle3", "", "--spec-type", "ngram-mod", *never) as service:
        assert (await say(service, words(30, 1), **ASKED))["ids"] == after(words(30, 1), REPLY)


@pytest.mark.parametrize("flags", ["--spec-synth-rates 0.5,0.6,0.4,0.3", "--spec-synth-len 9"])
async def test_impossible_rates_are_refused(opened: Opened, flags: str) -> None:
    with pytest.raises(ConfigError, match="synthetic acceptance"):
        async with opened("draft-eagle3", "random", *flags.split()):
            pass
