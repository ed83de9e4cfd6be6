"""What is in the bucket is found by the tokens of a prompt, as far as it goes and no further."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import ROW_IDENTITY, check_rows, make_hot, write_all

from towerd.store import FormatRequest, Store
from towerd.tiers.shared import measured_speed
from towerd.tiers.shared.bucket import open_bucket
from towerd.tiers.shared.deleting.condemned import CondemnedLists
from towerd.tiers.shared.deleting.leases import Hold
from towerd.tiers.shared.fetcher import Fetcher
from towerd.tiers.shared.marks import MARK_TOKENS, Marks
from towerd.tiers.shared.objects import PutRows, RowsPlace
from towerd.tiers.shared.sealing import TenantKeys
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, common_prefix

MASTER = bytes(32)
KEYS = TenantKeys.of(MASTER, "local")
IDS = np.arange(1000, dtype=np.int32)


def tower(turns: list[int]) -> Ids:
    """Runs of 100 tokens; equal beginnings for equal numbers."""
    return np.concatenate([np.full(100, turn, np.int32) for turn in turns])


@settings(max_examples=40)
@given(
    towers=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), max_size=4),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    n_known=st.integers(0, 2400),
)
def test_the_furthest_mark_is_found(
    towers: list[list[int]], prompt: list[int], n_known: int
) -> None:
    """Compared with looking at every tower."""
    asked = tower(prompt)
    with tempfile.TemporaryDirectory() as folder:
        bucket = open_bucket(f"file://{folder}")
        marks = Marks(bucket, KEYS, (b"model",))
        hold = Hold(bucket, CondemnedLists(bucket, KEYS))
        furthest = 0
        for number, turns in enumerate(towers):
            ids = tower(turns)
            rows = [RowsPlace(str(number), 0, len(ids), False, 1)]
            marks.put(hold, KEYS, ids.tobytes(), PutRows(rows))
            shared = common_prefix(ids, asked) // MARK_TOKENS * MARK_TOKENS
            furthest = max(furthest, shared)
            assert marks.put(hold, KEYS, ids.tobytes(), PutRows([])) == 0
        found = marks.find(KEYS, asked.tobytes(), n_known)
        if furthest // MARK_TOKENS <= n_known // MARK_TOKENS:
            assert found is None
        else:
            assert found is not None
            assert found.n_tokens == furthest
            (place,) = found.put.rows
            assert common_prefix(tower(towers[int(place.name)]), asked) >= furthest
        assert Marks(bucket, KEYS, (b"other",)).find(KEYS, asked.tobytes(), 0) is None


@pytest.mark.parametrize("gone", range(7))
def test_the_last_mark_is_found_though_one_before_it_is_gone(tmp_path: Path, gone: int) -> None:
    """As those of a conversation that had the same beginning, and was deleted."""
    bucket = open_bucket(f"file://{tmp_path}")
    marks, ids = Marks(bucket, KEYS, (b"model",)), np.arange(8 * MARK_TOKENS, dtype=np.int32)
    hold = Hold(bucket, CondemnedLists(bucket, KEYS))
    rows, made = PutRows([RowsPlace("rows", 0, len(ids), False, 1)]), list[Path]()
    for n in range(MARK_TOKENS, len(ids) + 1, MARK_TOKENS):
        marks.put(hold, KEYS, ids[:n].tobytes(), rows)
        made += {*tmp_path.glob("marks/*")} - {*made}
    made[gone].unlink()
    found = marks.find(KEYS, ids.tobytes(), 0)
    assert found is not None
    assert found.n_tokens == len(ids)


def tier_of(store: Store, folder: Path) -> SharedTier:
    bucket = open_bucket(f"file://{folder}/bucket")
    return SharedTier(store, bucket, MASTER, "near", has_rows=True)


@pytest.mark.parametrize(("n_common", "n_found"), [(255, 0), (256, 256), (700, 700), (1000, 900)])
async def test_a_prompt_finds_its_beginning(tmp_path: Path, n_common: int, n_found: int) -> None:
    """A public base and a tenant's chat behind it, put by one store: another gets the rows that its prompt has
    in common with them, down to the token; what it knows then is not asked for again."""
    prompt = IDS.copy()
    prompt[n_common:] += 5000
    with (
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
        Store.open(tmp_path / "two", ROW_IDENTITY) as two,
    ):
        write_all(one, one.insert(IDS, "public", [600])[-1])
        chat = one.insert(IDS, "local", [600, 900])[-1]
        make_hot(one, chat)
        one.rows.write([chat])
        tier_of(one, tmp_path).put_path(IDS[:600], "public")
        tier_of(one, tmp_path).put_path(IDS[:900], "local")
        shared = tier_of(two, tmp_path)
        fetcher = Fetcher(shared)
        fetcher.evaluated(64, 64.0)  # there is time enough to wait
        for _ in range(2):
            await fetcher.before(prompt, "local", two.deletions.watch())
            assert shared.n_stored(prompt, "local") == n_found
        if n_found:
            assert check_rows(two, two.match(prompt[:n_found], "local").nodes[-1]) == n_found
        n_asked = 1 if n_found == 900 else 2
        assert fetcher.stats() == {
            "lookups": n_asked,
            "lookups_found": int(n_found > 0),
            "lookups_late": 0,
        }
        fetcher.has_run(prompt, "local")
        await fetcher.before(prompt, "local", two.deletions.watch())
        assert fetcher.stats()["lookups"] == n_asked
        await fetcher.close()
        two.check_integrity(keys=True)


async def test_rows_are_not_sent_again_in_another_format(tmp_path: Path) -> None:
    """Once they are there they stay, and a tower that continues behind them adds its own."""
    with (
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
        Store.open(tmp_path / "two", ROW_IDENTITY) as two,
    ):
        base = one.insert(IDS, "local", [300])[-1]
        write_all(one, base)
        tier = tier_of(one, tmp_path)
        first = tier.put_path(IDS[:300], "local")
        assert base.file is not None
        assert one.rows.reencode(base.file, [FormatRequest(0, 300, "q8")]) is not None
        chat = one.insert(IDS, "local", [300, 900])[-1]
        make_hot(one, chat)
        one.rows.write([chat])
        put = tier.put_path(IDS[:900], "local")
        assert put.rows[0] == first.rows[0]
        assert [(place.p0, place.p1) for place in put.rows] == [(0, 300), (300, 900)]
        other = tier_of(two, tmp_path)
        other.fetch_path(put, IDS, "local")
        assert (
            other.n_stored(IDS, "local")
            == check_rows(two, two.match(IDS, "local").nodes[-1])
            == 900
        )
        again = tier.put_path(IDS[:900], "local")
        assert (again, first.n_tokens) == (put, 300)
        shutil.rmtree(tmp_path / "bucket" / "objects" / put.rows[1].name)
        assert tier.put_path(IDS[:900], "local") == put


async def test_fetching_is_chosen_by_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that evaluates faster than the bucket gives does not fetch."""
    monkeypatch.setattr(measured_speed, "MEASURED_BYTES_MIN", 0)
    with (
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
        Store.open(tmp_path / "two", ROW_IDENTITY) as two,
    ):
        for start in (0, 5000):
            ids = IDS + start
            write_all(one, one.insert(ids, "local", [1000])[-1])
            tier_of(one, tmp_path).put_path(ids, "local")
        shared = tier_of(two, tmp_path)
        fetcher = Fetcher(shared)
        fetcher.evaluated(64, 64.0)
        await fetcher.before(IDS, "local", two.deletions.watch())
        assert shared.n_stored(IDS, "local") == 1000
        fetcher.evaluated(10**9, 1e-3)
        await fetcher.before(IDS + 5000, "local", two.deletions.watch())
        await fetcher.close()
        assert shared.n_stored(IDS + 5000, "local") == 0
        assert (fetcher.stats()["lookups"], fetcher.stats()["lookups_found"]) == (2, 1)
