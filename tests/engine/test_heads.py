"""Heads that predict several tokens (MTP): replies are those of a daemon without them, and what they read
stays beside the sequences that it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from any_arch import N_VOCAB
from heads import FIRST_WORD, HEADS, make_head_gguf
from lora_adapter import write_adapter
from scripted_model import make_scripted_model
from services import EmbeddedService, OpenService
from speculating import EVEN, drafted, gist, say

from towerd.engine.embedded.run.drafts import HeadDrafts
from towerd.errors import ConfigError
from towerd.tokens import Ids

FLAGS = ("--spec-type", "draft-mtp", "--spec-draft-n-max")
REPLY = 40
Opened: TypeAlias = Callable[..., AbstractAsyncContextManager[EmbeddedService]]


@pytest.fixture
def opened(service_on: OpenService, tmp_path: Path) -> Opened:
    """`async with opened(model, n_max)`: a service on one store; n_max: 0 without speculation."""

    def on(
        model: Path, n_max: int, **settings: Any
    ) -> AbstractAsyncContextManager[EmbeddedService]:
        flags = (*FLAGS, str(n_max)) if n_max else ()
        fixed = {"store_dir": tmp_path / "store", "ctx_size": 1024, "anticipate": False}
        return service_on(model, **({"llama_server_args": flags} | fixed | EVEN | settings))

    return on


@pytest.fixture(scope="session", params=list(HEADS))
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def models(arch: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By how the head guesses."""
    folder = tmp_path_factory.mktemp("heads")
    found = {}
    for guesses in ("of token", "of state", "wrong", "random"):
        found[guesses] = folder / f"{arch} {guesses}.gguf"
        make_head_gguf(found[guesses], arch, guesses)
    return found


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    assert (await asyncio.to_thread(service.store.verify)).ok


def ids(n: int, seed: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(FIRST_WORD, N_VOCAB, n)]


async def chat(service: EmbeddedService) -> list[dict[str, Any]]:
    """A chat that continues, is regenerated, is edited, and one beside it."""
    said = []
    first = ids(90, 1)
    asked: dict[str, Any] = {"n_predict": REPLY, "ignore_eos": True, "cache_prompt": True}
    said.append(await say(service, first, **asked))
    second = first + said[0]["ids"] + ids(20, 2)
    said.append(await say(service, second, **asked))
    said.append(await say(service, second, **asked))
    said.append(await say(service, first[:60] + ids(30, 3), **asked))
    said += await asyncio.gather(
        say(service, second + said[1]["ids"], **asked), say(service, ids(70, 4), **asked)
    )
    return said


async def test_replies_are_the_same_and_right_guesses_are_taken(
    opened: Opened, models: dict[str, Path], arch: str
) -> None:
    async with opened(models["of token"], 0) as service:
        without = await chat(service)
    async with opened(models["of token"], 3) as service:
        said = await chat(service)
        await settle(service)
    for one, other in zip(said, without, strict=True):
        assert gist(one) == gist(other)
        n, n_right = drafted(one)
        assert n == n_right >= REPLY // 2
        assert drafted(other) == (0, 0)


async def test_a_state_is_that_of_the_token_before(opened: Opened, models: dict[str, Path]) -> None:
    """Also where a chat is regenerated, edited, answered beside another one, or comes from the store."""
    async with opened(models["of state"], 1) as service:
        said = await chat(service)
        await settle(service)
    for each in said:
        n, n_right = drafted(each)
        assert n == n_right >= REPLY // 2 - 1
    async with opened(models["of state"], 1) as service:
        again = await say(
            service, ids(90, 1) + said[0]["ids"] + ids(20, 2), n_predict=REPLY, ignore_eos=True,
            cache_prompt=True,
        )  # fmt: skip
        assert again["ids"] == said[1]["ids"]
        n, n_right = drafted(again)
        assert n == n_right >= REPLY // 2 - 1


async def test_wrong_guesses_leave_nothing(
    opened: Opened, models: dict[str, Path], tmp_path: Path
) -> None:
    """The reply is the same, and so are the rows: the chat continues from them after a restart."""
    async with opened(models["wrong"], 0, store_dir=tmp_path / "other") as service:
        without = await chat(service)
    async with opened(models["wrong"], 3) as service:
        said = await chat(service)
        await settle(service)
    for one, other in zip(said, without, strict=True):
        assert gist(one) == gist(other)
        n, n_right = drafted(one)
        assert n_right <= n // 8
    async with opened(models["wrong"], 3) as service:
        assert [each["ids"] for each in await chat(service)] == [each["ids"] for each in said]


async def test_a_head_reads_no_state_of_another_chat(
    opened: Opened, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was said in a sequence before: a chat that gets it at the same position drafts the same."""
    found, draft = [], HeadDrafts.draft
    alone: dict[str, Any] = {"live_sequences": 1, "parallel": 1}
    asked: dict[str, Any] = {"n_predict": REPLY, "ignore_eos": True, "cache_prompt": True}
    for seed in (7, 8):
        drafts: list[list[int]] = []

        def noted(self: HeadDrafts, jobs: Any, drafts: Any = drafts) -> list[Ids]:
            made = draft(self, jobs)
            drafts += [each.tolist() for each in made]
            return made

        async with opened(models["random"], 3, store_dir=tmp_path / str(seed), **alone) as service:
            first = await say(service, ids(60, 1), **asked)
            await settle(service)
            await say(service, ids(60, seed), scope="other", **asked)
            await settle(service)
            with monkeypatch.context() as patched:
                patched.setattr(HeadDrafts, "draft", noted)
                await say(service, ids(60, 1) + first["ids"] + ids(1, 2), **asked)
        found.append(drafts)
    assert found[0] == found[1]
    assert any(found[0])


async def test_drafts_that_were_not_evaluated_hold_up_none(
    opened: Opened, models: dict[str, Path], arch: str, tmp_path: Path
) -> None:
    """Requests under different adapters take turns; both have drafts all the while."""
    model, path = models["of token"], tmp_path / "adapter.gguf"
    adapter = write_adapter(path, model, seed=1, strength=0.0, arch=arch)
    asked: dict[str, Any] = {"n_predict": REPLY, "ignore_eos": True}
    async with opened(models["of token"], 3) as service:
        alone = drafted(await say(service, ids(60, 5), **asked))
    flags = (*FLAGS, "3", "--lora", str(adapter))
    async with opened(models["of token"], 0, llama_server_args=flags) as service:
        adapted = service.engine.adapters.scope("local", [{"id": 0, "scale": 1.0}])
        both = await asyncio.gather(
            say(service, ids(60, 5), **asked), say(service, ids(60, 6), scope=adapted, **asked)
        )
    assert [drafted(each) for each in both] == [alone, alone]


async def test_a_head_in_a_file_of_its_own(
    opened: Opened, models: dict[str, Path], arch: str
) -> None:
    """What follows from the file need not be said; weights may be kept on the CPU."""
    for flags in (
        ("-md", str(models["of token"])),
        ("-md", str(models["of token"]), "--spec-draft-cpu-moe"),
    ):
        words = (*flags, "--spec-draft-n-max", "3")
        async with opened(models["of token"], 0, llama_server_args=words) as service:
            n, n_right = drafted(await say(service, ids(90, 1), n_predict=REPLY, ignore_eos=True))
            assert n == n_right >= REPLY // 2


async def test_without_a_head_or_with_others_it_is_refused(
    opened: Opened, models: dict[str, Path], tmp_path: Path
) -> None:
    make_scripted_model(tmp_path / "none.gguf", ["Yes."])
    with pytest.raises(ConfigError, match="no head that predicts several tokens"):
        async with opened(tmp_path / "none.gguf", 3):
            pass
    both = ("--spec-type", "draft-mtp,ngram-simple")
    with pytest.raises(ConfigError, match="does not go together with ngram-simple"):
        async with opened(models["wrong"], 0, llama_server_args=both):
            pass
