"""Tiers over rows in stored formats: what is planned, composed, promoted, exported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import calibration_of, graded_calibration
from format_oracle import plane_of
from seams import hot_policy
from store_tools import (
    ROW_IDENTITY,
    assert_same_rows,
    check_rows,
    formats_of,
    moved_rows_of,
    rows_of,
)
from waiting import until

from towerd.drift import DecodedRun, Drift
from towerd.policy.base import LRU
from towerd.slots.blob import emit_blob, parse_blob
from towerd.slots.layout import NATIVE, KVLayout
from towerd.store import FormatRequest, Node, Store
from towerd.tiers.formats.calibration import SqueezedFormat
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import Gap, RestorePlan
from towerd.tiers.shrink import SINKS, TAIL
from towerd.tokens import Provenance

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
IDS = np.random.default_rng(0).integers(0, 1000, 600).astype(np.int32)
N_STORED = 600 - SINKS - TAIL
Q6H = LevelFormats(("q6h",))
OpenTiers = Callable[..., tuple[Store, Tiers]]


@pytest.fixture
def open_tiers(tmp_path: Path) -> Iterator[OpenTiers]:
    """`open_tiers(**settings)`: tiers over this test's store; what was open before is closed."""
    opened: list[tuple[Store, Tiers]] = []

    def close() -> None:
        for store, tiers in opened:
            tiers.close()
            store.check_integrity(keys=True)
            store.close()
        opened.clear()

    def open_it(**settings: Any) -> tuple[Store, Tiers]:
        close()
        store = Store.open(tmp_path / "store", replace(ROW_IDENTITY, layout=LAYOUT))
        values: dict[str, Any] = {
            "v_trans": False, "hot_bytes": 1 << 30, "warm_bytes": 1 << 30, "policy": "lru",
            "shrink_after_s": 0.0, "promote_delay_s": 0.0,
        }  # fmt: skip
        opened.append((store, Tiers(store, LAYOUT, **(values | settings))))
        return opened[-1]

    yield open_it
    close()


def put(store: Store, tiers: Tiers, ends: tuple[int, ...] = (600,)) -> list[Node]:
    """A recorded path whose rows came out of the live context."""
    path = store.insert(IDS, "local", ends)
    (gap,) = tiers.gaps(IDS, "local")
    tiers.accept(gap, rows_of(IDS, 0, LAYOUT))
    tiers.flush()
    return path


def composed(
    tiers: Tiers, plan: RestorePlan
) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """The blobs of a plan and the provenance of all their tokens."""
    blobs, provenance = [], []
    for item in tiers.compose(plan):
        blobs.append(item.blob.copy())
        provenance.append(item.provenance)
        assert item.n == len(item.provenance) == item.n_hot + item.n_warm
        tiers.recycle(item)
    return blobs, np.concatenate(provenance)


def test_unused_rows_shrink_by_themselves(open_tiers: OpenTiers) -> None:
    """Written as computed, re-encoded in the background; a plan says what it would bring."""
    store, tiers = open_tiers(forced=Q6H)
    (leaf,) = put(store, tiers)
    until(lambda: tiers.stats()["segments_shrunk"] == 1)
    store.rows.drop_hot(leaf)
    plan = tiers.plan(tiers.store.hold(IDS, "local"), 0)
    assert (plan.n_warm, plan.n_approximate) == (600, N_STORED)
    assert tiers.plan(tiers.store.hold(IDS, "local"), 300).n_approximate == 600 - TAIL - 300
    blobs, provenance = composed(tiers, plan)
    assert (
        provenance.tolist()
        == [Provenance.EXACT] * SINKS
        + [Provenance.APPROXIMATE] * N_STORED
        + [Provenance.EXACT] * TAIL
    )
    (part,) = store.plan_rows(leaf, 0, 600)
    assert bytes(blobs[0]) == bytes(emit_blob(list(store.rows.load(part)), layout=LAYOUT))
    found = parse_blob(blobs[0], layout=LAYOUT).rows
    native = rows_of(IDS, 0, LAYOUT)
    for p0, p1 in ((0, SINKS), (600 - TAIL, 600)):
        assert_same_rows(found.slice(p0, p1), native.slice(p0, p1))
    kept = N_STORED * LAYOUT.stored_as("q6h").token_bytes
    assert tiers.stats()["warm_quantized_bytes"] == kept
    assert tiers.stats()["level_formats"] == "0=q6h"


def test_promoted_rows_keep_their_format(open_tiers: OpenTiers) -> None:
    """In RAM they take what they take on disk, and are decoded on their way out."""
    store, tiers = open_tiers(forced=Q6H)
    path = put(store, tiers, (300, 600))
    until(lambda: tiers.stats()["segments_shrunk"] == 2)
    for node in path:
        store.rows.drop_hot(node)
    cold, _ = composed(tiers, tiers.plan(tiers.store.hold(IDS, "local"), 0))
    until(lambda: tiers.stats()["segments_promoted"] == 2)
    assert store.state.hot_bytes == sum(store.held(node).nbytes for node in path)
    assert store.state.hot_bytes < 0.6 * 600 * LAYOUT.token_bytes
    plan = tiers.plan(tiers.store.hold(IDS, "local"), 0)
    assert (plan.n_hot, plan.n_approximate) == (600, N_STORED)
    hot, provenance = composed(tiers, plan)
    assert all(map(np.array_equal, cold, hot))
    assert np.count_nonzero(provenance == Provenance.APPROXIMATE) == N_STORED


def test_small_blobs_cut_through_runs(
    open_tiers: OpenTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a tower is cut into blobs, the rows are the same."""
    store, tiers = open_tiers(forced=Q6H)
    path = put(store, tiers, (5, 300, 590, 600))
    until(lambda: tiers.stats()["segments_shrunk"] > 0)
    for node in path:
        store.rows.drop_hot(node)
    whole, provenance = composed(tiers, tiers.plan(tiers.store.hold(IDS, "local"), 0))
    monkeypatch.setattr("towerd.tiers.composer.BLOB_BYTES", 7 * LAYOUT.token_bytes)
    pieces, again = composed(tiers, tiers.plan(tiers.store.hold(IDS, "local"), 0))
    assert len(pieces) == -(-600 // 7)
    assert np.array_equal(provenance, again)
    rows = parse_blob(whole[0], layout=LAYOUT).rows
    for piece in pieces:
        part = parse_blob(piece, layout=LAYOUT).rows
        assert_same_rows(part, rows.slice(part.p0, part.p1))


def test_calibration_sets_the_table(open_tiers: OpenTiers) -> None:
    """None until it is there; never against a forced one, and not under exact fidelity."""
    store, tiers = open_tiers()
    (leaf,) = put(store, tiers)
    assert tiers.formats is None
    assert tiers.stats()["segments_shrunk"] == 0
    tiers.set_formats(LevelFormats(("q8",)))
    until(lambda: tiers.stats()["segments_shrunk"] == 1)
    store.rows.drop_hot(leaf)
    assert formats_of(store, leaf)[1] == (N_STORED, "q8")
    for settings in ({"forced": Q6H}, {"fidelity": "exact"}):
        _, tiers = open_tiers(**settings)
        tiers.set_formats(LevelFormats(("q4",)))
        assert tiers.formats == settings.get("forced")


def test_short_of_space_what_is_worth_least_is_squeezed_before_it_leaves(
    open_tiers: OpenTiers,
) -> None:
    """With room nothing is; near the end of the budget the older half, and with it the drift that
    replies tell; a chat leaves only beyond the budget, its end first."""
    store, tiers = open_tiers()
    both = Drift(0.011, 0.0)
    found = calibration_of(store.state.row_identity, ("q8",) * 3)
    nothing: list[DecodedRun] = []
    whole = np.zeros(0, bool), nothing, [DecodedRun(0, 600, "q4h")], 600
    chats = [np.roll(IDS, seed) for seed in range(4)]
    for ids in chats:
        for end in (300, 600):  # a file for each turn
            store.insert(ids[:end], "local", (end,))
            for gap in tiers.gaps(ids[:end], "local"):
                tiers.accept(gap, rows_of(ids[:end], gap.p0, LAYOUT))
                tiers.flush()
        tiers.visited(store.match(ids, "local").nodes[-1], time.time())
    for node in store.nodes():
        store.rows.drop_hot(node)
    tiers.set_formats(LevelFormats(("q8",)), found, SqueezedFormat("q4h", both))
    until(lambda: tiers.stats()["segments_shrunk"] == 8)
    assert (tiers.stats()["segments_squeezed"], tiers.drift_of(*whole)) == (0, None)
    tiers.warm_bytes_max = int(store.state.warm_bytes / 0.95)
    tiers.flush()
    until(lambda: tiers.stats()["segments_squeezed"] >= 2)
    until(lambda: store.state.warm_bytes < 0.9 * tiers.warm_bytes_max)
    ends = [store.match(ids, "local").nodes[-1] for ids in chats]
    assert {name for _, name in formats_of(store, ends[0].path()[0])} == {NATIVE, "q4h"}
    assert {name for _, name in formats_of(store, ends[3].path()[0])} == {NATIVE, "q8"}
    drift = tiers.drift_of(*whole)
    assert drift is not None
    assert drift.excess == pytest.approx(both.excess)
    assert tiers.stats()["warm_evictions"] == 0
    tiers.warm_bytes_max = store.state.warm_bytes - 1
    tiers.flush()
    assert [end.file is None for end in ends] == [True, False, False, False]
    assert all(end.path()[0].file is not None for end in ends)


def test_approximate_rows_are_never_exported(open_tiers: OpenTiers) -> None:
    """When their file is gone, live copies of them do not become stored rows."""
    store, tiers = open_tiers()
    path = store.insert(IDS, "local", [200, 400, 600])
    provenance = np.zeros(600, np.uint8)
    provenance[250:260] = Provenance.APPROXIMATE
    provenance[400:] = Provenance.DERIVED
    gaps = tiers.gaps(IDS, "local", provenance)
    assert [(gap.p0, gap.p1) for gap in gaps] == [(0, 200), (400, 600)]
    tiers.accept(gaps[1], rows_of(IDS, 400, LAYOUT))
    tiers.flush()
    assert path[2].file is not None
    assert set(path[2].file.provenance(400, 600).tolist()) == {Provenance.DERIVED}


def test_exact_fidelity_uses_and_makes_exact_rows_only(open_tiers: OpenTiers) -> None:
    """What an earlier run stored approximately is evaluated again, and replaced."""
    store, tiers = open_tiers(forced=Q6H)
    path = put(store, tiers, (300, 600))
    until(lambda: tiers.stats()["segments_shrunk"] == 2)
    store, tiers = open_tiers(fidelity="exact")
    assert tiers.plan(tiers.store.hold(IDS, "local"), 0).n == 0
    gaps = tiers.gaps(IDS, "local", np.zeros(600, np.uint8))
    assert [(gap.p0, gap.p1) for gap in gaps] == [(0, 600)]
    assert tiers.gaps(IDS, "local", np.full(600, Provenance.DERIVED, np.uint8)) == []
    tiers.accept(gaps[0], rows_of(IDS, 0, LAYOUT))
    tiers.flush()
    assert len(store.files()) == 1
    assert tiers.gaps(IDS, "local", np.zeros(600, np.uint8)) == []
    store, tiers = open_tiers(fidelity="exact")
    plan = tiers.plan(tiers.store.hold(IDS, "local"), 0)
    assert (plan.n_warm, plan.n_approximate) == (600, 0)
    path = list(store.match(IDS, "local").nodes)
    assert [formats_of(store, node) for node in path] == [[(300, NATIVE)]] * 2
    assert check_rows(store, path[-1]) == 600


def test_a_damaged_stored_file_ends_the_rows(open_tiers: OpenTiers) -> None:
    """What is before it is composed, the rest is left to prefill; no client sees an error."""
    store, tiers = open_tiers(forced=Q6H)
    path = store.insert(IDS, "local", [300, 600])
    rows = rows_of(IDS, 0, LAYOUT)
    for node, p0 in zip(path, (0, 300), strict=True):
        store.rows.attach_hot([node], rows.slice(p0, p0 + 300))
        store.rows.write([node])
        store.rows.drop_hot(node)
    until(lambda: tiers.stats()["segments_shrunk"] == 2)
    store, tiers = open_tiers(forced=Q6H, shrink_after_s=1e6)
    lower = store.match(IDS, "local").nodes[-1].file
    assert lower is not None
    with lower.path.open("r+b") as handle:
        handle.seek(-200, 2)
        handle.write(b"damage")
    plan = tiers.plan(tiers.store.hold(IDS, "local"), 0)
    assert plan.n == 600
    _, provenance = composed(tiers, plan)
    assert len(provenance) == 600 - TAIL  # the last rows are a blob of their own
    assert tiers.stats()["damaged_segments"] == 1
    assert tiers.plan(tiers.store.hold(IDS, "local"), 0).n == 300


def test_eviction_waits_for_no_other_thread(
    open_tiers: OpenTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split that comes while victims are chosen holds the store's lock and waits for ours."""
    with hot_policy(LRU) as made:
        store, tiers = open_tiers()
    policy = made[0]
    put(store, tiers)
    splitting = threading.Thread(target=lambda: store.insert(IDS, "local", [300]))
    real = policy.victims

    def store_is_busy() -> bool:
        lock: Any = store.state.lock
        if lock.acquire(blocking=False):
            lock.release()
            return False
        return True

    def victims(n_bytes: int, may_go: Callable[[int], bool], frees: None) -> list[int]:
        if splitting.ident is None:
            splitting.start()
            until(store_is_busy)
        found: list[int] = real(n_bytes, may_go, frees)
        return found

    monkeypatch.setattr(policy, "victims", victims)
    tiers.hot_bytes_max = 1
    tiers.flush()
    splitting.join()
    tiers.flush()
    assert store.state.hot_bytes == 0


def test_eviction_counts_what_files_take(open_tiers: OpenTiers) -> None:
    """After shrinking the budget holds more; the policy knows the new file."""
    store, tiers = open_tiers(forced=Q6H)
    put(store, tiers)
    until(lambda: tiers.stats()["segments_shrunk"] == 1)
    (file,) = store.files()
    assert store.state.warm_bytes == file.nbytes == file.path.stat().st_size
    tiers.warm_bytes_max = file.nbytes - 1
    tiers.flush()
    assert store.files() == []
    assert tiers.stats()["warm_evictions"] == 1


def moved_from(n: int) -> np.ndarray[Any, Any]:
    """The provenance of 600 live rows of which those from `n` on were moved or came after."""
    provenance = np.zeros(600, np.uint8)
    provenance[n:], provenance[n : n + 50] = Provenance.AFTER_MOVED, Provenance.MOVED
    return provenance


def accept(tiers: Tiers, gap: Gap) -> None:
    """Hand over rows of IDS: other bytes for moved ones."""
    make = moved_rows_of if gap.origin == Provenance.AFTER_MOVED else rows_of
    tiers.accept(gap, make(IDS[: gap.p1], gap.p0, LAYOUT))
    tiers.flush()


def test_moved_rows_are_stored_as_such(open_tiers: OpenTiers) -> None:
    """The segment that they begin in is cut there. They have a file of their own, which no format
    applies to; plans that do not want them end before them."""
    store, tiers = open_tiers(forced=Q6H)
    store.insert(IDS, "local", [200, 600])
    gaps = tiers.gaps(IDS, "local", moved_from(350))
    exact, moved = Provenance.EXACT, Provenance.AFTER_MOVED
    assert [(gap.p0, gap.p1, gap.origin) for gap in gaps] == [(0, 350, exact), (350, 600, moved)]
    for gap in gaps:
        accept(tiers, gap)
    assert tiers.gaps(IDS, "local", moved_from(350)) == []
    until(lambda: tiers.stats()["segments_shrunk"] == 2)
    for node in store.nodes():
        store.rows.drop_hot(node)
    (file,) = {node.file for node in store.nodes() if node.p1 == 600}
    assert file is not None
    assert (file.p0, file.n_rows, file.is_native) == (350, 250, True)
    assert tiers.stats()["moved_bytes"] == 250 * LAYOUT.token_bytes
    path = store.hold(IDS, "local")
    assert tiers.plan(path, 0, worst=Provenance.APPROXIMATE).n == 350
    plan = tiers.plan(path, 0)
    assert (plan.n, plan.n_moved, plan.n_approximate) == (600, 250, 600 - SINKS)
    _, provenance = composed(tiers, plan)
    assert provenance[350:].tolist() == [moved] * 250
    until(lambda: tiers.stats()["segments_promoted"] == 3)
    _, provenance = composed(tiers, tiers.plan(path, 0))  # out of RAM
    assert provenance[350:].tolist() == [moved] * 250
    assert tiers.plan(path, 0, worst=Provenance.APPROXIMATE).n == 350
    path.release()


@pytest.mark.parametrize("origin", [Provenance.EXACT, Provenance.DERIVED])
def test_better_rows_replace_moved_ones(open_tiers: OpenTiers, origin: Provenance) -> None:
    """In RAM and on disk, under near, and up to where they are; the file goes with its last view."""
    store, tiers = open_tiers()
    store.insert(IDS, "local", [600])
    (gap,) = tiers.gaps(IDS, "local", moved_from(0))
    accept(tiers, gap)
    (file,) = store.files()
    provenance = moved_from(400)
    provenance[:400] = origin
    (gap,) = tiers.gaps(IDS, "local", provenance)
    assert (gap.p0, gap.p1, gap.origin) == (0, 400, origin)
    accept(tiers, gap)
    assert file.path.exists()
    worst = [(node.worst_hot, node.worst_file) for node in store.match(IDS, "local").nodes]
    assert worst == [(origin, origin), (Provenance.AFTER_MOVED, Provenance.AFTER_MOVED)]
    (gap,) = tiers.gaps(IDS, "local", np.full(600, origin, np.uint8))
    accept(tiers, gap)
    assert not file.path.exists()
    assert tiers.stats()["moved_bytes"] == 0
    assert tiers.gaps(IDS, "local", moved_from(0)) == []
    for node in store.nodes():
        store.rows.drop_hot(node)
    assert check_rows(store, store.match(IDS, "local").nodes[-1]) == 600


def test_moved_rows_are_for_nobody_else(open_tiers: OpenTiers) -> None:
    """Not for public segments, nor for those that have any rows; under exact fidelity they are
    neither stored nor used, and replaced."""
    store, tiers = open_tiers()
    store.insert(IDS[:100], "public", [100])
    store.insert(IDS, "local", [300, 600])
    gaps = tiers.gaps(IDS, "local", moved_from(0))
    assert [(gap.p0, gap.p1) for gap in gaps] == [(100, 600)]
    assert tiers.gaps(IDS[:100], "public", moved_from(0)[:100]) == []
    accept(tiers, gaps[0])
    store.insert(IDS, "guest", [600])
    assert tiers.plan(store.hold(IDS, "guest"), 100).n == 0
    store, tiers = open_tiers(fidelity="exact")
    assert tiers.plan(store.hold(IDS, "local"), 100, worst=Provenance.AFTER_MOVED).n == 0
    assert tiers.gaps(IDS, "local", moved_from(0)) == []
    for gap in tiers.gaps(IDS, "local", np.zeros(600, np.uint8)):
        accept(tiers, gap)
    assert tiers.plan(store.hold(IDS, "local"), 0).n == 600
    assert tiers.stats()["moved_bytes"] == 0


def test_moved_rows_in_a_stored_format_stay_moved(open_tiers: OpenTiers) -> None:
    store, tiers = open_tiers()
    (leaf,) = store.insert(IDS, "local", [600])
    (gap,) = tiers.gaps(IDS, "local", moved_from(0))
    accept(tiers, gap)
    assert leaf.file is not None
    new = store.rows.reencode(leaf.file, [FormatRequest(0, 300, "q8")])
    assert new is not None
    assert set(new.provenance(0, 600).tolist()) == {Provenance.AFTER_MOVED}
    store.rows.drop_hot(leaf)
    assert store.plan_rows(leaf, 0, 600, worst=Provenance.APPROXIMATE) == []


def test_a_prompt_gets_no_more_approximate_rows_than_its_bound_allows(
    open_tiers: OpenTiers,
) -> None:
    """All of a stored prompt is in a format that was measured as a part of longer ones: the rest is
    evaluated, unless the new prompt is as long."""
    store, tiers = open_tiers(hot_bytes=0)
    store.insert(IDS, "local", (600,))
    for gap in tiers.gaps(IDS, "local"):
        tiers.accept(gap, rows_of(IDS, gap.p0, LAYOUT))
    tiers.flush()
    (node,) = store.match(IDS, "local").nodes
    assert node.file is not None
    store.rows.drop_hot(node)
    assert store.rows.reencode(node.file, [FormatRequest(SINKS, 600, "q4h")]) is not None
    found = graded_calibration(store.state.row_identity, ("q4h", "q5h", "q6h"), (0.2, 0.3, 0.5))
    tiers.use(found)
    for n_new in (20, 2000):
        ids = np.concatenate([IDS, np.full(n_new, 7, np.int32)])
        plan = tiers.plan(store.hold(ids, "local"), 0)
        drift = tiers.drift_of(np.zeros(0, bool), [], plan.decoded, len(ids))
        assert drift is not None
        assert drift.excess <= 0.002 * 1.00001
        assert (plan.n == 600) == (n_new == 2000)
        assert sum(len(rows) for _, rows in tiers.rows(plan)) == plan.n > 300
