"""Rows go to a bucket and come from it: what arrives is what was there, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from store_tools import (
    OTHER_MODEL,
    ROW_IDENTITY,
    check_rows,
    make_hot,
    moved_rows_of,
    turn_of,
    write_all,
)
from transformed import IDENTITY, basis, planes_of, transformed, written
from transformed import IDS as CODED_IDS

from towerd.errors import SessionDeleted
from towerd.store import FormatRequest, Node, Store
from towerd.tiers.formats.fidelity import Fidelity
from towerd.tiers.shared import objects
from towerd.tiers.shared.bucket import open_bucket
from towerd.tiers.shared.objects import PutRows
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, Provenance

MASTER = bytes(range(32))
IDS = np.arange(100, 160, dtype=np.int32)
OpenTier = Callable[..., SharedTier]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[Store]]:
    """Two empty stores of one model."""
    with (
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
        Store.open(tmp_path / "two", ROW_IDENTITY) as two,
    ):
        yield [one, two]
        for store in (one, two):
            store.check_integrity(keys=True)


@pytest.fixture
def tier_of(tmp_path: Path) -> OpenTier:
    """`tier_of(store)`: a tier over the one bucket of the test."""

    def make(store: Store, master: bytes = MASTER, fidelity: Fidelity = "near") -> SharedTier:
        bucket = open_bucket(f"file://{tmp_path}/bucket%20of%20mine")
        return SharedTier(store, bucket, master, fidelity, has_rows=True)

    return make


def grown(store: Store, ends: list[int], scope: str = "local", ids: Ids = IDS) -> Node:
    """The end of a path with a node end at each of `ends`, each node's rows in a file of its own."""
    for n in range(1, len(ends) + 1):
        write_all(store, store.insert(ids, scope, ends[:n])[-1])
    return store.match(ids, scope).nodes[-1]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def arrive(tier: SharedTier, store: Store, put: PutRows, ids: Ids, scope: str = "local") -> int:
    """Fetch, and check every row that is there then; how many of the path are."""
    tier.fetch_path(put, ids, scope)
    n = tier.n_stored(ids, scope)
    match = store.match(ids, scope)
    assert not match.nodes or check_rows(store, match.nodes[-1]) >= n
    return n


@pytest.mark.parametrize("ends", [[60], [20, 60], [1, 2, 59]])
@pytest.mark.parametrize("before", [[], [7], [30, 60]])
def test_rows_arrive(
    stores: list[Store], tier_of: OpenTier, ends: list[int], before: list[int]
) -> None:
    """However the paths are cut here and there; what is there already is not sent again."""
    one, two = stores
    grown(one, ends)
    if before:
        two.insert(IDS, "local", before)
    tier = tier_of(one)
    put = tier.put_path(IDS, "local")
    assert put.n_tokens == ends[-1]
    sent = tier.counters.bytes_put
    assert tier.put_path(IDS, "local") == put
    assert (tier.counters.put, tier.counters.bytes_put) == (len(ends) + 1, sent)
    other = tier_of(two)
    assert arrive(other, two, put, IDS) == ends[-1]
    assert other.counters.fetched == len(ends)
    assert arrive(other, two, put, IDS) == ends[-1]
    assert other.counters.fetched == len(ends)
    assert tier_of(two).put_path(IDS, "local") == put  # they have the same names from here


def test_a_beginning_is_fetched(stores: list[Store], tier_of: OpenTier) -> None:
    """A path that leaves in the middle of an object takes what it has in common with it."""
    one, two = stores
    grown(one, [60])
    put = tier_of(one).put_path(IDS, "local")
    assert arrive(tier_of(two), two, put, IDS[:25]) == 25
    assert arrive(tier_of(two), two, put, IDS) == 60


@pytest.mark.parametrize("n_common", [1, 10, 59])
def test_of_a_file_no_more_is_put_than_is_of_the_path(
    stores: list[Store], tier_of: OpenTier, tmp_path: Path, n_common: int
) -> None:
    """A chat that leaves a public base early: its first rows go without those of the base behind them."""
    one, two = stores
    grown(one, [60], "public")
    chat = IDS.copy()
    chat[n_common:] += 1000
    leaf = one.insert(chat, "local", [n_common, 60])[-1]
    make_hot(one, leaf)
    one.rows.write([leaf])
    put = tier_of(one).put_path(chat, "local")
    assert [(place.p0, place.p1) for place in put.rows] == [(0, n_common), (n_common, 60)]
    assert arrive(tier_of(two), two, put, chat) == 60
    assert arrive(tier_of(two), two, put, IDS) == n_common
    assert list((tmp_path / "one" / "tmp").iterdir()) == []
    assert tier_of(one).put_path(IDS, "public").n_tokens == 60


def test_other_tokens_and_other_models(
    stores: list[Store], tier_of: OpenTier, tmp_path: Path
) -> None:
    """Of the rows of other tokens those arrive that are the same, and none of another model's."""
    one, two = stores
    grown(one, [20, 60])
    put = tier_of(one).put_path(IDS, "local")
    for place in (0, 30, 59):
        changed = IDS.copy()
        changed[place] += 1
        tier = tier_of(two)
        assert arrive(tier, two, put, changed) == place
        assert tier.counters.damaged == (place == 0)
    with Store.open(tmp_path / "three", OTHER_MODEL) as three:
        assert arrive(tier_of(three), three, put, IDS) == 0


def test_tenants_and_keys(stores: list[Store], tier_of: OpenTier, tmp_path: Path) -> None:
    """No tenant reads another's, nor anyone with another key; names do not tell that two have the same
    text, and what is public is everybody's."""
    one, two = stores
    for scope in ("alice", "bob"):
        grown(one, [60], scope)
    alice, bob = (tier_of(one).put_path(IDS, scope) for scope in ("alice", "bob"))
    assert alice.rows[0].name != bob.rows[0].name
    assert arrive(tier_of(two), two, alice, IDS, "bob") == 0
    assert arrive(tier_of(two, bytes(32)), two, alice, IDS, "alice") == 0
    assert arrive(tier_of(two), two, alice, IDS, "alice") == 60
    stored = b"".join(path.read_bytes() for path in files_of(tmp_path / "bucket of mine"))
    assert IDS[:8].tobytes() not in stored
    public = IDS + 1000
    grown(one, [60], "public", public)
    put = tier_of(one).put_path(public, "public")
    assert arrive(tier_of(two), two, put, public, "carol") == 60
    assert arrive(tier_of(two), two, put, public, "public") == 60


def test_a_tenants_rows_do_not_become_public(stores: list[Store], tier_of: OpenTier) -> None:
    one, two = stores
    grown(one, [60], "alice")
    put = tier_of(one).put_path(IDS, "alice")
    two.insert(IDS, "public", [60])
    assert arrive(tier_of(two), two, put, IDS, "alice") == 0


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "gone", "swapped"])
@pytest.mark.parametrize("part_bytes", [1 << 22, 1 << 12])
def test_damage(
    stores: list[Store],
    tier_of: OpenTier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    part_bytes: int,
) -> None:
    """Whatever happens to any one object: the rows before it arrive, no wrong one does, and once the object is
    removed, the next put makes it whole."""
    one, two = stores
    monkeypatch.setattr(objects, "PART_BYTES", part_bytes)
    grown(one, [20, 40, 60])
    put = tier_of(one).put_path(IDS, "local")
    folder = tmp_path / "bucket of mine"
    middle = folder / "objects" / put.rows[1].name
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)
    parts = files_of(middle)
    assert len(parts) == (1 if part_bytes == 1 << 22 else len(parts)) >= 1
    for number, part in enumerate(parts):
        data = part.read_bytes()
        for at in {0, len(data) // 3, len(data) - 1} if kind == "flip" else {len(data) // 2}:
            changed = bytearray(data)
            changed[at] ^= 1
            other = files_of(folder / "objects" / put.rows[2].name)[0].read_bytes()
            damage = {"flip": bytes(changed), "cut": data[:at], "empty": b"", "swapped": other}
            part.unlink()
            if kind != "gone":
                part.write_bytes(damage[kind])
            root = tmp_path / f"new-{number}-{at}"
            with Store.open(root, ROW_IDENTITY) as store:
                tier = tier_of(store)
                assert arrive(tier, store, put, IDS) == 20
                assert tier.counters.damaged + tier.counters.missing == 1
                assert not list((root / "tmp").iterdir())
            shutil.rmtree(part.parent)
            tier_of(one).put_path(IDS, "local")
            assert {path.name for path in files_of(middle)} == {path.name for path in parts}
    assert arrive(tier_of(two), two, put, IDS) == 60


def test_two_writers(stores: list[Store], tier_of: OpenTier, tmp_path: Path) -> None:
    """Two daemons that put the same tower at once, again and again, each in its own pieces: what is there is
    whole, and equal rows are there once."""
    one, two = stores
    grown(one, [20, 60])
    grown(two, [20, 60])
    folder, tiers = tmp_path / "bucket of mine", (tier_of(one), tier_of(two))
    with ThreadPoolExecutor(2) as pool:
        for number in range(10):
            shutil.rmtree(folder / "objects", ignore_errors=True)
            puts = list(pool.map(lambda tier: tier.put_path(IDS, "local"), tiers))
            assert puts[0] == puts[1]
            assert len(files_of(folder / "objects")) == 2
            with Store.open(tmp_path / f"new-{number}", ROW_IDENTITY) as store:
                assert arrive(tier_of(store), store, puts[0], IDS) == 60


def test_rows_that_are_not_exact(stores: list[Store], tier_of: OpenTier) -> None:
    """Moved rows are never put; an exact store takes none that are in a stored format, nor puts them."""
    one, two = stores
    moved = one.insert(IDS, "local", [60])[-1]
    one.rows.attach_hot([moved], moved_rows_of(IDS), origin=Provenance.AFTER_MOVED)
    one.rows.write([moved])
    assert tier_of(one).put_path(IDS, "local").rows == []
    other = IDS + 500
    leaf = one.insert(other, "local", [60])[-1]
    make_hot(one, leaf)
    one.rows.write([leaf], requests=[FormatRequest(4, 50, "q8")])
    put = tier_of(one).put_path(other, "local")
    assert put.n_tokens == 60
    assert tier_of(one, fidelity="exact").put_path(other, "local").rows == []
    assert arrive(tier_of(two, fidelity="exact"), two, put, other) == 0
    assert arrive(tier_of(two), two, put, other) == 60


def test_transform_coded_rows(tier_of: OpenTier, tmp_path: Path) -> None:
    """They come with their basis, and decode to the same numbers; without it they are refused."""
    with (
        Store.open(tmp_path / "one", IDENTITY) as one,
        Store.open(tmp_path / "two", IDENTITY) as two,
        Store.open(tmp_path / "three", IDENTITY) as three,
    ):
        leaf = written(one, 700)
        transformed(one, leaf, 100, 600)
        ids = CODED_IDS[:700]
        put = tier_of(one).put_path(ids, "local")
        assert [each.basis for each in put.transform_bases] == list(one.rows.bases.names())
        tier_of(two).fetch_path(put, ids, "local")
        there = two.match(ids, "local").nodes[-1]
        assert two.rows.bases.names() == {basis().digest[:8].hex()}
        for mine, theirs in zip(
            planes_of(two, there, 0, 700), planes_of(one, leaf, 0, 700), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        (where,) = (tmp_path / "bucket of mine" / "objects").glob(put.transform_bases[0].name)
        shutil.rmtree(where)
        tier = tier_of(three)
        tier.fetch_path(put, ids, "local")
        counters = tier.counters
        assert (tier.n_stored(ids, "local"), counters.missing, counters.damaged) == (0, 1, 1)


def test_a_budget_for_writing_holds(stores: list[Store], tier_of: OpenTier) -> None:
    one, two = stores
    grown(one, [60])
    put = tier_of(one).put_path(IDS, "local")
    two.writes.budget = 1000
    assert arrive(tier_of(two), two, put, IDS) == 0
    assert two.writes.n_refused == 1
    two.writes.budget = 0
    assert arrive(tier_of(two), two, put, IDS) == 60


def test_a_deleted_session_gets_no_rows(stores: list[Store], tier_of: OpenTier) -> None:
    """Rows that are on their way to a session while it is deleted bring none of its tokens back."""
    one, two = stores
    grown(one, [60])
    put = tier_of(one).put_path(IDS, "local")
    session = two.commit_turn(turn_of(IDS[:50].tolist(), IDS[50:].tolist())).session_id
    since = two.deletions.watch()
    two.delete_session(session)
    with pytest.raises(SessionDeleted):
        tier_of(two).fetch_path(put, IDS, "local", since)
    two.gc()
    assert two.nodes() == []
