"""What a head that drafts knows of a chat outlasts the chat's leaving: after a restart it drafts what it
would have drafted without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from any_arch import N_VOCAB
from heads import FIRST_WORD, HEADS, WINDOWED, make_head_gguf
from oracle import inside
from services import EmbeddedService, OpenService
from speculating import EVEN, say
from waiting import until_async

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.run.drafts import HeadDrafts
from towerd.slots.rows import KVRows, join_heads
from towerd.store import SegmentFile
from towerd.store.segments.segment_header import decode_head
from towerd.tokens import Ids

FLAGS = ("--spec-type", "draft-mtp", "--spec-draft-n-max")
REPLY = 40
N_MAX = 2
Opened: TypeAlias = Callable[..., AbstractAsyncContextManager[EmbeddedService]]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in HEADS} | {
    "step35 windowed": ("step35", WINDOWED)
}


@pytest.fixture
def opened(service_on: OpenService, tmp_path: Path) -> Opened:
    """`async with opened(model)`: a service on one store; n_max=0: without speculation."""

    def on(
        model: Path, n_max: int = N_MAX, **settings: Any
    ) -> AbstractAsyncContextManager[EmbeddedService]:
        flags = (*FLAGS, str(n_max)) if n_max else ()
        fixed = {"store_dir": tmp_path / "store", "ctx_size": 1024, "anticipate": False}
        return service_on(model, **({"llama_server_args": flags} | fixed | EVEN | settings))

    return on


Drafted: TypeAlias = list[tuple[int, list[int]]]
"""(tokens before a draft, the draft)."""


class Noted(dict[int, Drafted]):
    """The drafts of each chat, by its first token, in order."""

    def take(self, chat: list[int]) -> Drafted:
        return self.pop(chat[0], [])


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What heads draft while a test runs."""
    made, draft = Noted(), HeadDrafts.draft

    def noted(self: HeadDrafts, asked: Sequence[tuple[Job, int]]) -> list[Ids]:
        found = draft(self, asked)
        for (job, _), each in zip(asked, found, strict=True):
            made.setdefault(int(job.ids[0]), []).append((job.n, each.tolist()))
        return found

    monkeypatch.setattr(HeadDrafts, "draft", noted)
    return made


def head_gguf(folder: Path, kind: str) -> Path:
    arch, more = KINDS[kind]
    path = folder / f"{kind}.gguf"
    make_head_gguf(path, arch, "of rows", more=more)
    return path


@pytest.fixture(scope="session", params=list(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_gguf(tmp_path_factory.mktemp("heads"), str(request.param))


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_gguf(tmp_path_factory.mktemp("dense"), "glm4moe")


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    assert (await asyncio.to_thread(service.store.verify)).ok


def ids(n: int, seed: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(FIRST_WORD, N_VOCAB, n)]


FIRST, SECOND, THIRD = ids(150, 1), ids(10, 2), ids(10, 3)


async def turn(service: EmbeddedService, prompt: list[int], **fields: Any) -> list[int]:
    """The prompt with its reply."""
    asked = {"n_predict": REPLY, "ignore_eos": True, "cache_prompt": True} | fields
    said = await say(service, prompt, **asked)
    await settle(service)
    return [*prompt, *said["ids"]]


async def forget_live(service: EmbeddedService) -> None:
    service.engine.forget_live()
    await inside(service, lambda: None)


async def never_left(
    opened: Opened, model: Path, drafts: Noted, folder: Path, **settings: Any
) -> tuple[list[int], Drafted]:
    """A chat of three turns in one service: its tokens, and the drafts of the last turn."""
    async with opened(model, store_dir=folder / "other", **settings) as service:
        chat = await turn(service, FIRST)
        chat = await turn(service, chat + SECOND)
        drafts.clear()
        chat = await turn(service, chat + THIRD)
    return chat, drafts.take(chat)


async def test_a_chat_drafts_after_restarts_what_it_would_have_drafted(
    opened: Opened, model: Path, drafts: Noted, tmp_path: Path
) -> None:
    """Draft for draft, from files and from RAM; without what was stored of the head it does not."""
    stayed, wanted = await never_left(opened, model, drafts, tmp_path)
    assert len(wanted) > REPLY // 4
    async with opened(model) as service:
        chat = await turn(service, FIRST)
    async with opened(model) as service:
        chat = await turn(service, chat + SECOND)
        await forget_live(service)
        drafts.clear()
        assert await turn(service, chat + THIRD) == stayed
        assert drafts.take(stayed) == wanted
    async with opened(model, store_dir=tmp_path / "bare", n_max=0) as service:
        assert await turn(service, await turn(service, FIRST) + SECOND) == chat
    async with opened(model, store_dir=tmp_path / "bare") as service:
        assert await turn(service, chat + THIRD) == stayed
        assert drafts.take(stayed) != wanted


async def test_turns_without_the_head_leave_what_is_there(
    opened: Opened, dense: Path, drafts: Noted, tmp_path: Path
) -> None:
    """A daemon without drafts reads and continues the chat; the next one with them drafts from what the head
    has of it, and so on."""
    stayed, wanted = await never_left(opened, dense, drafts, tmp_path)
    async with opened(dense) as service:
        chat = await turn(service, FIRST)
    async with opened(dense, n_max=0) as service:
        drafts.clear()
        chat = await turn(service, chat + SECOND)
        assert not drafts
    for _ in range(2):
        async with opened(dense) as service:
            assert await turn(service, chat + THIRD) == stayed
            assert len(drafts.take(stayed)) > REPLY // 4


async def test_branches_share_what_the_head_has(
    opened: Opened, dense: Path, drafts: Noted, tmp_path: Path
) -> None:
    """Two chats whose common beginning was split off one file, beside each other."""
    others = [FIRST[:100] + ids(20, seed) for seed in (8, 9)]
    async with opened(dense, store_dir=tmp_path / "other") as service:
        await turn(service, FIRST)
        wanted = []
        for each in others:
            drafts.clear()
            chat = await turn(service, each)
            wanted.append(drafts.take(chat))
    async with opened(dense) as service:
        await turn(service, FIRST)
    async with opened(dense) as service:
        for each, expected in zip(others, wanted, strict=True):
            drafts.clear()
            chat = await turn(service, each)
            assert drafts.take(chat) == expected


async def test_a_preempted_chat_takes_it_along(
    opened: Opened, dense: Path, drafts: Noted, tmp_path: Path
) -> None:
    """Chats that do not fit the context beside each other draft as those that do."""
    prompts = [ids(180, seed) for seed in (11, 12)]
    asked: dict[str, Any] = {"n_predict": 100, "ignore_eos": True, "cache_prompt": True}
    found = []
    for n_cells in (2048, 512):
        folder = tmp_path / f"{n_cells}"
        async with opened(dense, ctx_size=512, live_tokens=n_cells, store_dir=folder) as service:
            drafts.clear()
            await asyncio.gather(*(say(service, each, **asked) for each in prompts))
            await settle(service)
            found.append([dict(drafts.take(each)) for each in prompts])
            assert (service.engine.stats()["preemptions"] > 0) == (n_cells == 512)
    for one, other in zip(*found, strict=True):
        both = one.keys() & other.keys()  # one step is without a draft where it was preempted
        assert len(both) > 0.8 * len(one)
        assert [one[n] for n in both] == [other[n] for n in both]


async def test_re_encoding_keeps_what_the_head_has(
    opened: Opened, dense: Path, drafts: Noted, tmp_path: Path
) -> None:
    stayed, wanted = await never_left(opened, dense, drafts, tmp_path)
    small = {"level_formats": "0=q8", "shrink_after_s": 0.0}
    async with opened(dense) as service:
        chat = await turn(service, await turn(service, FIRST) + SECOND)
    async with opened(dense, **small) as service:
        await until_async(lambda: service.tiers.stats()["segments_shrunk"] > 0)
    async with opened(dense, **small) as service:
        assert await turn(service, chat + THIRD) == stayed
        assert service.tiers.stats()["warm_quantized_bytes"] > 0
        assert drafts.take(stayed)[-len(wanted) :] == wanted


async def test_damage_to_what_the_head_has_costs_drafts_alone(
    opened: Opened, dense: Path, drafts: Noted, tmp_path: Path
) -> None:
    stayed, wanted = await never_left(opened, dense, drafts, tmp_path)
    async with opened(dense) as service:
        chat = await turn(service, await turn(service, FIRST) + SECOND)
        files = {node.file for node in service.store.nodes() if node.file is not None}
    for file in files:
        flip_head(file)
    async with opened(dense) as service:
        said = await say(service, chat + THIRD, n_predict=REPLY, ignore_eos=True, cache_prompt=True)
        assert chat + THIRD + said["ids"] == stayed
        assert said["timings"]["cache_n"] == len(chat) - 1
        assert drafts.take(stayed) != wanted


def flip_head(file: SegmentFile) -> None:
    with file.path.open("r+b") as handle:
        header, start = decode_head(memoryview(handle.read()))
        assert header.head is not None
        handle.seek(start + header.head.planes[0].offset)
        byte = handle.read(1)[0]
        handle.seek(-1, 1)
        handle.write(bytes([byte ^ 1]))


async def test_rows_of_a_head_with_other_types_are_not_taken_for_its_own(
    opened: Opened, dense: Path, drafts: Noted, tmp_path: Path
) -> None:
    """It drafts as if there were none."""
    words = (*FLAGS, str(N_MAX), "--spec-draft-type-k", "q8_0")
    found = []
    for n_max in (N_MAX, 0):
        folder = tmp_path / f"{n_max}"
        async with opened(dense, n_max, store_dir=folder) as service:
            chat = await turn(service, await turn(service, FIRST) + SECOND)
        async with opened(dense, llama_server_args=words, store_dir=folder) as service:
            drafts.clear()
            chat = await turn(service, chat + THIRD)
            found.append((chat, drafts.take(chat)))
    assert found[0] == found[1]
    assert len(found[0][1]) > REPLY // 4


async def test_a_chat_reads_nothing_that_another_left(opened: Opened, tmp_path: Path) -> None:
    """In a sequence that was another tenant's, a head computes what it does in one that never was used."""
    path = tmp_path / "states.gguf"
    make_head_gguf(path, "glm4moe", "of states")
    one = {"parallel": 1, "live_sequences": 1}
    async with opened(path, store_dir=tmp_path / "other", **one) as service:
        wanted = head_of(service, await turn(service, FIRST))
    async with opened(path, **one) as service:
        await turn(service, ids(150, 21), scope="another")
        await forget_live(service)
        found = head_of(service, await turn(service, FIRST))
    assert found.positions.tolist() == wanted.positions.tolist()
    assert found.p0 == 0
    for mine, theirs in zip(found.planes(), wanted.planes(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35"])
async def test_wrong_drafts_leave_what_a_prompt_would_have(
    opened: Opened, arch: str, tmp_path: Path
) -> None:
    """Each row is computed with the hidden state of the token before, also where drafts were wrong and their
    right tokens are evaluated once more."""
    path = tmp_path / "states.gguf"
    make_head_gguf(path, arch, "of states")
    async with opened(path, 3) as service:
        chat = await turn(service, FIRST)
        assert (
            service.engine.stats()["draft_tokens"] > service.engine.stats()["draft_tokens_accepted"]
        )
        found = head_of(service, chat)
    async with opened(path, 3, store_dir=tmp_path / "other") as service:
        await turn(service, chat, n_predict=1)
        wanted = head_of(service, chat)
    assert found.positions.tolist() == wanted.positions.tolist()[: len(found)]
    assert len(found) == len(chat) - 1
    for mine, theirs in zip(found.planes(), wanted.planes(), strict=True):
        a, b = (each[: len(found)].copy().view(np.float16) for each in (mine, theirs))
        np.testing.assert_allclose(a, b, atol=0.02)


def head_of(service: EmbeddedService, chat: list[int]) -> KVRows:
    """What is in RAM of the head beside the rows of a chat."""
    nodes = service.store.match(np.array(chat, np.int32), "local").nodes
    heads = [rows.head for node in nodes for rows in node.hot or ()]
    assert all(head is not None for head in heads)
    joined = join_heads(heads)
    assert joined is not None
    return joined.rows


async def test_beside_a_chat_with_a_budget(opened: Opened, dense: Path, tmp_path: Path) -> None:
    """Its rows leave and are moved without those of the head, which it does not use; after a restart both
    chats continue."""
    shapes = [LiveBudget("streaming", 96), LiveBudget()]
    found = []
    for n_max in (0, N_MAX):
        said: list[list[int]] = []
        for _ in range(2):
            async with opened(dense, n_max, store_dir=tmp_path / f"{n_max}") as service:
                asked: dict[str, Any] = {"n_predict": REPLY, "ignore_eos": True}
                chats = said[-2:] or [FIRST, ids(150, 31)]
                both = await asyncio.gather(
                    *(
                        say(service, chat, live, cache_prompt=True, **asked)
                        for chat, live in zip(chats, shapes, strict=True)
                    )
                )
                said += [chat + each["ids"] for chat, each in zip(chats, both, strict=True)]
                await settle(service)
        found.append(said)
    assert found[0] == found[1]
