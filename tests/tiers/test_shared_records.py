"""What a store put is known there after it left the disk, and what is in the bucket twice is passed over."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_tools import ROW_IDENTITY, write_all

from towerd.errors import InvalidRequest
from towerd.store import Store
from towerd.tiers.shared import tier as module
from towerd.tiers.shared.bucket import Listed, open_bucket
from towerd.tiers.shared.naming import naming
from towerd.tiers.shared.records import RecordName, best_first, version_of
from towerd.tiers.shared.tier import SharedTier

IDS = np.arange(700, dtype=np.int32)


def tier_of(store: Store, folder: Path) -> SharedTier:
    bucket = open_bucket(f"file://{folder}/bucket")
    return SharedTier(store, bucket, bytes(32), "near", has_rows=True)


@pytest.mark.parametrize(("n", "n_found"), [(700, 700), (701, 700), (690, 300), (400, 0), (299, 0)])
def test_rows_that_left_the_disk_are_still_in_the_bucket(
    tmp_path: Path, n: int, n_found: int
) -> None:
    """A path that ends where one was put that way has all of its objects, any other those before its last mark."""
    ids = np.append(IDS, np.int32(7))[:n]
    with (
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
        Store.open(tmp_path / "two", ROW_IDENTITY) as two,
    ):
        for end in (300, 700):
            write_all(one, one.insert(IDS, "local", [300, 700][: end // 300])[-1])
        tier_of(one, tmp_path).put_path(IDS, "local")
        assert tier_of(two, tmp_path).put_path(ids, "local").n_tokens == n_found


NAME = RecordName(1, "a" * 16, "b" * 16, 0, "0" * 64)


def test_a_record_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORD_BYTES_MAX", 1000)
    with Store.open(tmp_path / "one", ROW_IDENTITY) as store:
        tier = tier_of(store, tmp_path)
        with pytest.raises(
            InvalidRequest, match="takes 1000 bytes; the shared tier takes up to 1000"
        ):
            tier.put_record("local", "sessions/x", NAME, bytes(1000), naming([]))
        for _ in range(2):
            tier.put_record("local", "sessions/x", NAME, bytes(900), naming([]))
        (place,) = [each.place for each in tier.bucket.listing("sessions/x")]
        assert tier.read_record("local", place) == bytes(900)


HEX = st.sampled_from(["a" * 16, "b" * 16])
NAMES = st.builds(RecordName, st.integers(1, 3), HEX, HEX, st.integers(0, 2), st.just("0" * 64))


@given(names=st.lists(NAMES, unique=True, max_size=6), text=HEX, is_newest=st.booleans())
def test_which_record_is_taken(names: list[RecordName], text: str, is_newest: bool) -> None:
    """The first one is of the highest version; of its text none has more rows of this model. A text that is put is
    the newest if it is to be, and otherwise no older than it was."""
    listed = [
        Listed(f"bases/x/{name}", datetime.fromtimestamp(at, UTC)) for at, name in enumerate(names)
    ]
    found = best_first([*listed, Listed("bases/x/junk", datetime.now(UTC))], "a" * 16)
    assert sorted(str(each.name) for each in found) == sorted(map(str, names))
    version = version_of(text, found, is_newest=is_newest)
    if not names:
        assert version == 1
        return
    best = found[0].name
    same = [name for name in names if (name.version, name.text) == (best.version, best.text)]
    assert best.version == max(name.version for name in names)
    mine = [name for name in same if name.model == "a" * 16]
    assert best.n_rows == max(name.n_rows for name in (mine or same))
    assert not mine or best in mine
    known = [name.version for name in names if name.text == text]
    if best.text == text:
        assert version == best.version
    elif is_newest or not known:
        assert version == best.version + 1
    else:
        assert version == max(known)
