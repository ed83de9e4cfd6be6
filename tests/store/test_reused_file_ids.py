"""A file that is gone leaves its id to the next one; nothing that was begun with it is mistaken for that one's."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_tools import ROW_IDENTITY, check_rows, ids_of, write_all
from transformed import (
    IDENTITY,
    basis,
    coded_rows_of,
    library_decodes,
    planes_of,
    same,
    transform,
    written,
)

from towerd.store import FormatRequest, Store
from towerd.store.rows.recoding import STEP_ROWS, CodingInterrupted

N = 2 * STEP_ROWS


def test_what_was_encoded_of_a_file_is_not_taken_for_another(tmp_path: Path) -> None:
    """The encoding of its rows was interrupted, and it left the disk."""
    n_pauses = 0

    def interrupted() -> None:
        nonlocal n_pauses
        n_pauses += 1
        if n_pauses == 3:  # with the first rows encoded
            raise CodingInterrupted

    with Store.open(tmp_path / "store", IDENTITY) as store:
        store.rows.bases.add(basis())
        request = [FormatRequest(0, N, transform())]
        first = written(store, N, seed=0)
        assert first.file is not None
        id = first.file.id
        with pytest.raises(CodingInterrupted):
            store.rows.reencode(first.file, request, interrupted)
        store.rows.drop_file(first.file)
        second = written(store, N, seed=1)
        assert second.file is not None
        assert second.file.id == id
        assert store.rows.reencode(second.file, request) is not None
        expected = library_decodes(coded_rows_of(N, seed=1), 0, N)
        assert same(planes_of(store, second, 0, N), expected)


def test_a_file_that_has_the_id_of_a_dropped_one_stays(tmp_path: Path) -> None:
    """A repair has listed the dropped one."""
    with Store.open(tmp_path / "store", ROW_IDENTITY) as store:
        nodes = [
            store.insert(ids_of(*range(first, first + 40)), "local", [40])[-1]
            for first in (0, 100, 200)
        ]
        for node in nodes[:2]:
            write_all(store, node)
        old, new = nodes[1], nodes[2]
        assert old.file is not None
        id = old.file.id

        def progress(done: int, total: int) -> None:
            if old.file is not None:
                store.rows.drop_file(old.file)
                write_all(store, new)

        report = store.verify(progress, repair=True)
        assert new.file is not None
        assert new.file.id == id
        assert report.ok, report.problems
        assert check_rows(store, new) == 40
