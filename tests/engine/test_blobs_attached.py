"""Stored blobs that llama.cpp takes from the mapped file as they are: real contexts, real
answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle, ask, check_answer, settle
from services import OpenService

from towerd.slots.labels import Labels
from towerd.tiers.composer import Composer, Piece
from towerd.tiers.plan import Composed
from towerd.tokens import Ids

N = 300


def _prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(260, 500, n).astype(np.int32)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Any blob counts as large, and 60,000 bytes fill one; the tokens of each that is handed on."""
    monkeypatch.setattr("towerd.tiers.composer.DIRECT_BYTES_MIN", 1)
    monkeypatch.setattr("towerd.store.segments.segment_writer.BLOB_BYTES_MAX", 60_000)
    seen: list[int] = []
    real = Composer.blobs

    def watch(
        self: Composer, pieces: Iterable[Piece], places: Labels | None = None
    ) -> Iterator[Composed]:
        for composed in real(self, pieces, places):
            if composed.buffer is None:
                seen.append(composed.n)
            yield composed

    monkeypatch.setattr(Composer, "blobs", watch)
    return seen


@pytest.mark.parametrize("flash_attn", ["off", "on"])
async def test_answers_are_those_of_prefill(
    service_on: OpenService, model_path: Path, oracle: Oracle, direct: list[int], flash_attn: str
) -> None:
    """After a restart the whole past is attached from the file; a branch takes whole blobs and a
    piece of one; and a context that has V the other way turns it around."""
    settings = {"fidelity": "exact", "flash_attn": flash_attn}
    async with service_on(model_path, **settings) as service:
        reply = (await ask(service, _prompt(N))).ids
        await settle(service)
    longer = np.concatenate([_prompt(N), np.array(reply, np.int32), _prompt(5, 1)])
    branch = np.concatenate([_prompt(N)[: N - 20], _prompt(30, 2)])
    for prompt, n in ((longer, N), (branch, N - 20)):
        direct.clear()
        async with service_on(model_path, **settings) as service:
            again = await ask(service, prompt)
            assert again.finish.reuse.warm >= n
            assert len(direct) > 1
            if prompt is longer:
                assert sum(direct) == again.finish.reuse.warm
            else:
                assert sum(direct) < again.finish.reuse.warm
            await settle(service)
        if flash_attn == "off":  # as the oracle's context has it
            check_answer(oracle, prompt, again)
    direct.clear()
    turned = settings | {"flash_attn": "on" if flash_attn == "off" else "off"}
    async with service_on(model_path, **turned) as service:
        again = await ask(service, longer)
        assert again.finish.reuse.warm >= N
        assert direct == []
        await settle(service)
