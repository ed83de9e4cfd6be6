"""A frozen session whose blob is coded again."""

from __future__ import annotations

from pathlib import Path

from cold_population import coder, name_of, record, said
from store_tools import FINGERPRINT

from towerd.codec import container
from towerd.cold import cold_history, freeze
from towerd.cold.freezing import recode
from towerd.store import Store


def test_a_blob_is_coded_again_in_the_smallest_form(tmp_path: Path) -> None:
    """The session stays frozen, its tokens and the other sessions are as before, and the store
    verifies. One that is not frozen, or not there, is left alone."""
    with Store.open(tmp_path / "store", FINGERPRINT) as store, coder(store.tables) as codec:
        for number in range(3):
            record(store, number)
        for number in range(2):
            freeze(store, codec, name_of(number), form="packed")
        before = store.session(name_of(0)).cold_bytes
        assert recode(store, codec, name_of(0), "local")
        frozen = store.cold.read(name_of(0))
        assert frozen is not None
        assert frozen.blob == codec.encode(said(0)[-1][len(frozen.base) :], base=frozen.base)
        assert store.session(name_of(0)).cold_bytes == len(frozen.blob) <= before
        for number in range(2):
            history = cold_history(store, codec, name_of(number))
            assert history is not None
            assert history.ids(history.leaf).tolist() == said(number)[-1]
        other = store.cold.read(name_of(1))
        assert other is not None
        assert container.read(other.blob).form.name == "packed"
        assert not recode(store, codec, name_of(2), "local")
        assert not recode(store, codec, "missing", "local")
        report = store.verify()
        assert report.ok, report.problems
