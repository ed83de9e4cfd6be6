"""Pictures whose tokens share a position (M-RoPE): rows are those of a fresh evaluation of the whole prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from oracle import inside
from seeing import HIGH, SQUARE, WIDE, Looked, SeeingOracle, letters, look, make_seeing
from services import EmbeddedService, OpenService
from waiting import until_async

from lab.models.shape import Arch
from towerd.media_ids import spans_of
from towerd.tiers.moved_limits import BLOCK_TOKENS, MovedLimits, block_offsets

NOISE = 0.005
"""Of log-probabilities, between evaluations of the same prompt in other batches and cells."""
APPROXIMATE = 0.1
"""Of log-probabilities, with 8 bits for a value."""
KEY_NOISE = 2e-3
"""Of keys in f16 that were rotated twice, relative to the largest."""
N_RUN = 300
Cells: TypeAlias = np.ndarray[Any, Any]
OpenSeeing = Callable[..., AbstractAsyncContextManager[EmbeddedService]]


@pytest.fixture(scope="module", params=["qwen2vl", "qwen3vl", "qwen35"])
def arch(request: pytest.FixtureRequest) -> Arch:
    found: Arch = request.param
    return found


@pytest.fixture(scope="module")
def files(arch: Arch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_seeing(tmp_path_factory.mktemp("seeing"), arch)


@pytest.fixture(scope="module")
def oracle(files: tuple[Path, Path]) -> Iterator[SeeingOracle]:
    made = SeeingOracle(*files)
    yield made
    made.close()


@pytest.fixture
def seeing(service_on: OpenService, files: tuple[Path, Path]) -> OpenSeeing:
    model, projector = files
    flags = ("--mmproj", str(projector), "--no-warmup")
    fixed = {"checkpoint_tokens": 16, "anticipate": False, "ctx_size": 1024}

    def open_it(**settings: Any) -> AbstractAsyncContextManager[EmbeddedService]:
        return service_on(model, llama_server_args=flags, **(fixed | settings))

    return open_it


async def settle(service: EmbeddedService) -> None:
    """Wait until everything recorded is stored; check that all counts agree."""
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    if service.engine.checkpoint_tier is not None:
        await asyncio.to_thread(service.engine.checkpoint_tier.flush)
    await inside(service, service.engine.pool.check_integrity)
    await asyncio.to_thread(service.store.check_integrity)


def encoded(service: EmbeddedService) -> int:
    return int(service.engine.stats()["media_encoded"])


async def test_behind_and_before(seeing: OpenSeeing, oracle: SeeingOracle) -> None:
    """Several pictures of other sizes among words, continued while they are live, from RAM and from files,
    at their end and from a branch."""
    a, b, c = (letters(20, seed) for seed in range(3))
    start = (a, (1, WIDE), b, (2, HIGH), (3, SQUARE))
    async with seeing() as service:
        first = await look(service, *start, c)
        assert oracle.difference(first) <= NOISE
        longer = await look(service, *start, c, letters(9, 4))
        assert oracle.difference(longer) <= NOISE
        branch = await look(service, *start, letters(15, 5), (1, SQUARE), c)
        assert oracle.difference(branch) <= NOISE
        assert encoded(service) == 4
        await settle(service)
        service.engine.forget_live()
        hot = await look(service, *start, c, letters(9, 6))
        assert hot.answer.finish.reuse.hot > len(first.ids) - 20
        assert oracle.difference(hot) <= NOISE
        await settle(service)
    async with seeing() as service:
        for more in (letters(9, 7), letters(9, 4)):
            warm = await look(service, *start, c, more)
            assert warm.answer.finish.reuse.prefill <= 30
            assert oracle.difference(warm) <= NOISE
        edited = await look(service, a, (1, WIDE), letters(21, 8), (2, HIGH), c)
        assert oracle.difference(edited) <= NOISE
        assert encoded(service) == 1
        await settle(service)


async def test_to_the_bit(seeing: OpenSeeing) -> None:
    """What is live after a restore is what was live before, rows and llama.cpp's own labels."""
    parts = letters(30, 1), (1, WIDE), letters(10, 2), (2, HIGH), letters(40, 3)

    def state(service: EmbeddedService, n: int) -> list[Any]:
        memory, (seq,) = service.engine.core.memory, list(service.engine.pool)
        rows = memory.rows(seq.id, 0, n, seq.places)
        assert rows is not None
        return [cells_of(memory.context.get_state(seq.id))[:n], *rows.k, *rows.v]

    async with seeing(fidelity="exact") as service:
        first = await look(service, *parts)
        await settle(service)
        n = len(first.ids) - 17
        before = await inside(service, lambda: state(service, n))
        service.engine.forget_live()
        again = await look(service, *parts, n_predict=1)
        assert again.answer.finish.reuse.hot >= n
        after = await inside(service, lambda: state(service, n))
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one, other)


async def test_rows_in_a_stored_format(seeing: OpenSeeing, oracle: SeeingOracle) -> None:
    """They are decoded into place, labels included."""
    parts = letters(20, 1), (1, WIDE), letters(20, 2), (2, HIGH), letters(200, 3)
    settings = {"level_formats": "0=q8h", "shrink_after_s": 0.0}
    async with seeing(**settings) as service:
        await look(service, *parts, n_predict=1)
        await settle(service)
    async with seeing(**settings) as service:
        await until_async(lambda: service.tiers.stats()["segments_shrunk"] > 0)
        again = await look(service, *parts, letters(5, 4))
        assert again.answer.finish.reuse.approximate > 60
        assert encoded(service) == 0
        assert oracle.difference(again) <= APPROXIMATE
        await settle(service)


async def test_rows_of_a_part(seeing: OpenSeeing, oracle: SeeingOracle) -> None:
    """The rows of some tokens of a picture are lost: it is evaluated again as a whole."""
    parts = letters(20, 1), (1, WIDE), letters(40, 2)
    async with seeing(warm_bytes=0) as service:
        first = await look(service, *parts)
        await settle(service)
        service.engine.forget_live()
        ((start, _),) = spans_of(first.ids)
        scope = first.request.scope
        service.store.insert(first.ids, scope, [start + 3, len(first.ids)])
        for node in service.store.nodes():
            if node.p0 >= start + 3:
                service.store.rows.drop_hot(node)
        again = await look(service, *parts)
        assert again.answer.finish.reuse.hot <= start
        assert encoded(service) == 2
        assert oracle.difference(again) <= NOISE
        await settle(service)


async def test_who_gives_way(seeing: OpenSeeing, oracle: SeeingOracle) -> None:
    """Chats that do not fit together, and share a picture: what was evaluated of those that wait is put
    back, behind what they share."""
    start = letters(30, 1), (1, WIDE), letters(10, 2)
    small = {"ctx_size": 512, "live_tokens": 512, "checkpoint_tokens": 32}
    async with seeing(**small) as service:
        await look(service, *start, n_predict=1)
        chats = [(*start, letters(20, 10 + i), (2 + i, HIGH), letters(5, i)) for i in range(4)]
        asked = (look(service, *chat, n_predict=120, reuse_tokens_min=0) for chat in chats)
        for looked in await asyncio.gather(*asked):
            assert len(looked.answer.ids) == 120
            assert oracle.difference(looked) <= NOISE
        assert service.engine.stats()["preemptions"] > 0
        assert encoded(service) == 5
        await settle(service)


@pytest.mark.parametrize("is_back", [False, True])
async def test_words_that_change_sides(
    seeing: OpenSeeing, oracle: SeeingOracle, arch: Arch, is_back: bool
) -> None:
    """A text from before a picture is found behind one, and back. Its rows are moved by as many
    positions as the text: the keys of the first layer, which know nothing of other tokens, are those
    that a fresh evaluation makes there."""
    run = letters(N_RUN, 1)
    before = letters(20, 2), run, (1, HIGH), letters(9, 3)
    behind = (2, WIDE), letters(30, 4), (1, HIGH), run, letters(11, 5)
    first, then = (behind, before) if is_back else (before, behind)
    async with seeing() as service:
        if arch == "qwen35":
            assert service.engine.why_not_movable
            return
        service.tiers.moved_limits = MovedLimits("", 0.0, 0.0, 0.0)
        await look(service, *first)
        await settle(service)
        service.engine.forget_live()
        moved = await look(service, *then, reuse_tokens_min=100)
        n_blocks = len(block_offsets(N_RUN))
        assert moved.answer.finish.reuse.moved == N_RUN - BLOCK_TOKENS * n_blocks
        made = await inside(service, lambda: live_state(service, moved))
        await settle(service)
    oracle.seen(moved)
    labels, keys = first_keys(oracle.context.get_state(0))
    assert np.array_equal(made[0], labels)
    assert np.abs(made[1] - keys).max() <= KEY_NOISE * np.abs(keys).max()


def live_state(service: EmbeddedService, looked: Looked) -> tuple[Cells, Cells]:
    """`first_keys` of the sequence that has the prompt and its reply."""
    n = len(looked.ids)
    (seq,) = [s for s in service.engine.pool if np.array_equal(s.tokens()[:n], looked.ids)]
    return first_keys(service.engine.core.context.get_state(seq.id))


def first_keys(blob: Cells) -> tuple[Cells, Cells]:
    """(`cells_of`, float32[n, d]: the keys of the first layer), in the order of the tokens."""
    labels = cells_of(blob)
    at = 16 + 24 * len(labels) + 8
    size = int(blob[at + 4 : at + 12].view("<u8")[0])
    keys = blob[at + 12 : at + 12 + size * len(labels)].view(np.float16)
    order = np.lexsort((labels[:, 1], labels[:, 2], labels[:, 0]))
    return labels[order], keys.reshape(len(labels), -1)[order].astype(np.float32)


def cells_of(blob: Cells) -> Cells:
    """int32[n, 4]: position, x, y and token of each cell of llama.cpp's own blob, in its order."""
    n = int(blob[12:16].view("<u4")[0])
    table = blob[16 : 16 + 24 * n].view("<i4").reshape(n, 6)
    return table[:, [0, 2, 3, 4]]
