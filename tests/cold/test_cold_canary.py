"""A runtime whose numbers changed: nothing is lost, and what depended on it is coded again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
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
from towerd.errors import ThawError
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.store.cold_row import row_digest

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


def without_fallback(store: Store, name: str) -> None:
    """Take from a session's blob what any machine can read."""
    frozen, catalog = store.cold.read(name), store.state.catalog
    assert frozen is not None
    blob = container.write(replace(container.read(frozen.blob), fallback=b""))
    pk = frozen.session.pk
    ((marks,),) = catalog.rows("SELECT marks FROM cold WHERE session = ?", (pk,))
    digest = row_digest(len(frozen.base), frozen.turns, marks, blob)
    with catalog.transaction():
        catalog.run("UPDATE blobs SET blob = ? WHERE session = ?", (blob, pk))
        catalog.run("UPDATE cold SET digest = ? WHERE session = ?", (digest, pk))


async def test_one_that_cannot_be_coded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays what it is, the others are coded again, and it thaws where its runtime is back."""
    root = tmp_path / "store"
    async with keeper_of(root) as keeper:
        for number in range(3):
            record(keeper.store, number)
            await keeper.freeze(name_of(number))
        without_fallback(keeper.store, name_of(1))
    monkeypatch.setenv("TOWERD_CODEC_FAULT", "logits")
    async with keeper_of(root) as keeper:
        assert (keeper.n_recoded, keeper.n_failed) == (2, 1)
        with pytest.raises(ThawError, match="failed its probe"):
            await keeper.thaw(name_of(1))
        assert keeper.store.session(name_of(1)).cold_bytes
    monkeypatch.delenv("TOWERD_CODEC_FAULT")
    async with keeper_of(root) as keeper:
        for number in range(3):
            assert (await keeper.session_ids(name_of(number))).tolist() == said(number)[-1]
