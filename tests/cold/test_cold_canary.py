"""A runtime whose numbers changed: nothing is lost, and what depended on it is coded again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cold_population import BOS, name_of, record, said
from store_tools import FINGERPRINT

from towerd.codec import container
from towerd.codec.base import Vocabulary
from towerd.codec.forms import RuntimeCoder
from towerd.codec.models.llama import LlamaPredictor
from towerd.codec.network import Same
from towerd.cold import Coding, Keeper, Source
from towerd.models.bundled import bundled_model
from towerd.store import Store

N = 6


@asynccontextmanager
async def keeper_of(root: Path, form: str = "same") -> AsyncIterator[Keeper]:
    """A keeper that codes with the bundled model itself, started; closed with its store."""
    predictors: list[LlamaPredictor] = []

    def networks(vocabulary: Vocabulary) -> Sequence[RuntimeCoder]:
        predictors.append(LlamaPredictor(bundled_model(), lanes_max=2, n_ctx=64))
        return [Same(vocabulary, predictors[0], first=BOS)]

    with Store.open(root, FINGERPRINT) as store:
        coding = Coding(lambda: Source(bundled_model(), "hash"), networks)
        keeper = Keeper(store, coding, freeze_after_s=-1, form=form)
        keeper.start()
        assert keeper._task is not None
        await asyncio.wait_for(keeper._task, 60)  # what it does once, at its start
        yield keeper
        await keeper.close()
    for predictor in predictors:
        predictor.close()


def forms(store: Store) -> set[str]:
    blobs = store.state.catalog.rows("SELECT blob FROM blobs")
    return {container.read(blob).form.name for (blob,) in blobs}


async def test_blobs_of_a_changed_runtime_are_coded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen in the form `same`; the same runtime keeps it; disturbed, every session is right at
    once, portable soon, and the next start has a probe of its own."""
    root = tmp_path / "store"
    async with keeper_of(root) as keeper:
        for number in range(N):
            record(keeper.store, number)
            await keeper.freeze(name_of(number))
        assert forms(keeper.store) == {"same"}
    async with keeper_of(root) as keeper:
        assert keeper.n_recoded == 0
        assert forms(keeper.store) == {"same"}
    monkeypatch.setenv("TOWERD_CODEC_FAULT", "logits")
    async with keeper_of(root) as keeper:
        assert keeper.n_recoded == N
        assert keeper.n_failed == 0
        assert "same" not in forms(keeper.store)
        report = keeper.store.verify()
        assert report.ok, report.problems
        for number in range(N):
            ids = await keeper.session_ids(name_of(number))
            assert ids.tolist() == said(number)[-1]
            info = keeper.store.session(name_of(number))
            ((size,),) = keeper.store.state.catalog.rows(
                "SELECT length(blob) FROM blobs JOIN sessions ON pk = session WHERE id = ?",
                (info.id,),
            )
            assert info.cold_bytes == size
    async with keeper_of(root) as keeper:
        assert keeper.n_recoded == 0
        await keeper.thaw(name_of(0))
        await keeper.freeze(name_of(0))
        assert "same" in forms(keeper.store)
    async with keeper_of(root) as keeper:
        assert keeper.n_recoded == 0
        assert "same" in forms(keeper.store)
