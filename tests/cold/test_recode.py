"""Coded forms that are renewed: those of frozen sessions and copies, when asked and in idle time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cold_population import coder, name_of, record, said
from store_tools import ROW_IDENTITY
from waiting import until_async

from towerd.codec import Codec, container
from towerd.codec.container import Blob
from towerd.codec.prior import file
from towerd.cold import (
    Coding,
    ColdTier,
    IdleFreezer,
    VocabularySource,
    cold_history,
    freeze,
    recode,
    write_copy,
)
from towerd.errors import NotFound, ThawError
from towerd.models.bundled import bundled_model
from towerd.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as opened:
        yield opened


def coded(store: Store, number: int) -> Blob:
    pks = {each.id: each.pk for each in store.cold.coded(0, 100)}
    return container.read(store.cold.blob(pks[name_of(number)]))


def check(store: Store, codec: Codec, number: int) -> None:
    """The session has its tokens, frozen or not."""
    name = name_of(number)
    history = cold_history(store, codec, name) or store.history(name)
    assert history.ids(history.leaf).tolist() == said(number)[-1]


def test_a_blob_is_coded_again_in_the_smallest_form(store: Store) -> None:
    """Sessions stay frozen or warm, their tokens and the other sessions are as before, and the store
    verifies. One that has no blob is left alone."""
    with coder(store.tables) as codec:
        for number in range(4):
            record(store, number)
        for number in range(2):
            freeze(store, codec, name_of(number), form="text")
        write_copy(store, codec, name_of(2), form="text")
        before = store.session(name_of(0)).cold_bytes
        assert recode(store, codec, name_of(0), "local")
        assert recode(store, codec, name_of(2))
        for number in (0, 2):
            assert container.write(coded(store, number)) == codec.encode(said(number)[-1])
        assert store.session(name_of(0)).cold_bytes < before
        assert store.session(name_of(2)).cold_bytes == 0
        assert coded(store, 1).form.name == "text"
        assert not recode(store, codec, name_of(3), "local")
        with pytest.raises(NotFound):
            recode(store, codec, "missing", "local")
        for number in range(4):
            check(store, codec, number)
        report = store.verify()
        assert report.ok, report.problems


@pytest.fixture
def earlier(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A frozen session, a copy and one in a form without a table, written by a release with another
    table, of which this is the name."""
    path = tmp_path / "earlier.gguf"
    shutil.copyfile(file.PATH, path)
    with path.open("ab") as table:
        table.write(b"\0")
    for number in range(3):
        record(store, number)
    with monkeypatch.context() as patch, coder(store.tables) as codec:
        patch.setattr(file, "PATH", path)
        file.bundled.cache_clear()
        freeze(store, codec, name_of(0), form="mix")
        write_copy(store, codec, name_of(1), form="mix")
        freeze(store, codec, name_of(2), form="packed")
        name = file.bundled().name
    file.bundled.cache_clear()
    return name


@pytest.mark.parametrize("freeze_after_s", [0, -1])
async def test_renewed_in_idle_time(store: Store, earlier: bytes, freeze_after_s: int) -> None:
    """By itself, what needs a table that is no longer written with, and nothing else; also where
    nothing is frozen by itself."""
    cold = ColdTier(
        store,
        Coding(lambda: VocabularySource(bundled_model(), "hash"), store.tables),
        freeze_after_s=freeze_after_s,
    )
    assert coded(store, 0).model == coded(store, 1).model == earlier
    freezer = IdleFreezer(cold)
    freezer.start()
    await until_async(lambda: cold.n_recoded == 2)
    assert earlier not in (coded(store, 0).model, coded(store, 1).model)
    assert coded(store, 2).form.name == "packed"
    assert store.session(name_of(0)).cold_bytes
    for number in range(3):
        check(store, cold.coding.codec, number)
    assert cold.n_failed == 0
    await freezer.stop()
    await cold.close()


def test_what_cannot_be_read_stays(store: Store, earlier: bytes) -> None:
    """The kept table is gone: an error names it, and the blob is as it was."""
    before = coded(store, 0)
    (table,) = store.tables.glob("mix-*")
    whole = table.read_bytes()
    table.unlink()
    with coder(store.tables) as codec, pytest.raises(ThawError, match=earlier.hex()):
        recode(store, codec, name_of(0))
    assert coded(store, 0) == before
    table.write_bytes(whole)
    with coder(store.tables) as codec:
        check(store, codec, 0)
