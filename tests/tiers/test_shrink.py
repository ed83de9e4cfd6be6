"""Which rows are put into which format, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from encrypted_stores import encrypt
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, check_rows, formats_of, make_hot, write_all
from waiting import until

from towerd.drift import Drift
from towerd.errors import DiskFull
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import KVRows
from towerd.store import Node, SegmentFile, Store
from towerd.store.rows.format_request import differs
from towerd.store.rows.rows import RowStore
from towerd.tiers import shrink
from towerd.tiers.formats.calibration import SqueezedFormat, remember_squeezed
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.shrink import SINKS, TAIL, Shrinker, tail_start
from towerd.tokens import Provenance

LAYOUT = KVLayout((plane_of("f16", 32),), (plane_of("f16", 64),))
TABLE = LevelFormats.parse("0=q4h,1=q6h,2=q8")
AFTER_S = 10.0
N_DEEP = 600


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    row_identity = replace(ROW_IDENTITY, layout=LAYOUT)
    with Store.open(tmp_path / "store", row_identity, clock=clock) as opened:
        yield opened


@pytest.fixture
def shrinker(store: Store, clock: Clock) -> Shrinker:
    return Shrinker(store, AFTER_S, clock)


def tokens(n: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def run(shrinker: Shrinker, table: LevelFormats | None = TABLE) -> list[SegmentFile]:
    """One whole look at all files; the new ones."""
    shrinker.set_formats(table, enabled=True)
    done = []
    while True:
        time.sleep(shrinker.wait_s())
        found = shrinker.step()
        if found is not None:
            done.append(found)
        elif shrinker.wait_s() > 0:  # until the next scan
            return done


def stored(store: Store, ids: npt.NDArray[np.int32], *ends: int) -> list[Node]:
    """A path with all its rows in one file."""
    path = store.insert(ids, "local", ends or [len(ids)])
    write_all(store, path[-1])
    return path


def test_sinks_and_tail_stay(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """The first 4 positions and the last 128 are what was computed."""
    (leaf,) = stored(store, tokens(500))
    clock.now += AFTER_S
    (new,) = run(shrinker)
    assert formats_of(store, leaf) == [(SINKS, NATIVE), (500 - SINKS - TAIL, "q8"), (TAIL, NATIVE)]
    assert leaf.file is new
    assert check_rows(store, leaf) == 500
    assert shrinker.n_shrunk == 1
    assert run(shrinker) == []
    store.check_integrity(keys=True)


def test_a_file_that_is_deleted_while_it_is_read(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of an encrypted store is opened again for it: nothing is complained of, and the next one follows."""
    encrypt(tmp_path / "store")
    row_identity = replace(ROW_IDENTITY, layout=LAYOUT)
    draft_again = RowStore.draft_again
    dropped: list[int] = []

    def dropped_first(rows: RowStore, file: SegmentFile, *args: Any) -> Any:
        if not dropped:
            dropped.append(rows.drop_file(file))
        return draft_again(rows, file, *args)

    monkeypatch.setattr(RowStore, "draft_again", dropped_first)
    with Store.open(tmp_path / "store", row_identity, clock=clock) as store:
        for seed in range(2):
            stored(store, tokens(500, seed))
        clock.now += AFTER_S
        shrinker = Shrinker(store, AFTER_S, clock)
        assert len(run(shrinker)) == 1
        assert dropped[0] > 0
        assert shrinker.n_damaged == 0


def test_old_tails_are_encoded_later(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """What is continued is no end any more."""
    ids = tokens(700)
    (first,) = stored(store, ids[:400])
    clock.now += AFTER_S
    run(shrinker)
    assert formats_of(store, first)[-1] == (TAIL, NATIVE)
    second = store.insert(ids, "local", [700])[-1]
    store.rows.attach_hot([second], rows_at(second))
    store.rows.write([second])
    store.rows.drop_hot(second)
    clock.now += AFTER_S
    assert len(run(shrinker)) == 2
    assert formats_of(store, first) == [(SINKS, NATIVE), (400 - SINKS, "q8")]
    assert formats_of(store, second) == [(300 - TAIL, "q8"), (TAIL, NATIVE)]
    assert check_rows(store, second) == 700


def rows_at(node: Node) -> KVRows:
    """The native rows of one node alone."""
    from store_tools import rows_of

    return rows_of(node.prefix_ids(), node.p0, LAYOUT)


def test_tails_reach_into_what_is_shared(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """A short end leaves the rest of its 128 to the segments above it."""
    ids = tokens(300)
    path = stored(store, ids, 200, 250, 300)
    clock.now += AFTER_S
    run(shrinker)
    assert [formats_of(store, node) for node in path] == [
        [(SINKS, NATIVE), (172 - SINKS, "q8"), (28, NATIVE)],
        [(50, NATIVE)],
        [(50, NATIVE)],
    ]


def test_short_rows_are_left_alone(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Nothing but sinks and tail: no file is written."""
    stored(store, tokens(TAIL + SINKS))
    clock.now += AFTER_S
    assert run(shrinker) == []


def test_tail_starts_before_the_nearest_end(store: Store) -> None:
    """Of all ends below a segment, the nearest counts."""
    ids = tokens(1000)
    base = store.insert(ids[:300], "local", [300])[-1]
    assert tail_start(base) == 300 - TAIL
    store.insert(np.concatenate([ids[:300], tokens(60, 1)]), "local", [360])
    store.insert(np.concatenate([ids[:300], tokens(40, 2)]), "local", [310, 340])
    assert tail_start(base) == 340 - TAIL
    store.insert(np.concatenate([ids[:300], tokens(40, 2), tokens(500, 3)]), "local", [840])
    assert tail_start(base) == 360 - TAIL
    (far,) = (node for node in store.nodes() if node.p1 == 840)
    store.pins.add(far.id)
    store.gc()
    assert tail_start(base) >= base.p1


def bases_and_a_leaf(store: Store) -> list[Node]:
    """Platform, community and bot with a conversation below; one file each."""
    ids = tokens(4 * N_DEEP)
    for level, name in enumerate(("p", "p/c", "p/c/b")):
        store.bases.add(name, ids[: N_DEEP * (level + 1)], "local", level, False)
    path = store.insert(ids, "local", [4 * N_DEEP])
    for node in path:
        store.rows.attach_hot([node], rows_at(node))
        store.rows.write([node])
        store.rows.drop_hot(node)
    return path


def test_levels_are_those_of_the_bases(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """The shallowest base that covers a segment gives its level; conversations are deepest."""
    path = bases_and_a_leaf(store)
    clock.now += AFTER_S
    assert len(run(shrinker)) == 4
    assert [formats_of(store, node)[-1] for node in path[:3]] == [
        (N_DEEP - SINKS, "q4h"),
        (N_DEEP, "q6h"),
        (N_DEEP, "q8"),
    ]
    assert formats_of(store, path[3]) == [(N_DEEP - TAIL, "q8"), (TAIL, NATIVE)]
    assert check_rows(store, path[3]) == 4 * N_DEEP


def test_levels_in_one_file(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Segments of several levels that were written together are cut into runs."""
    ids = tokens(3 * N_DEEP)
    path = stored(store, ids, N_DEEP, 2 * N_DEEP, 3 * N_DEEP)
    store.bases.add("p", ids[:N_DEEP], "local", 0, False)
    clock.now += AFTER_S
    (new,) = run(shrinker)
    assert [(run.n_rows, run.format) for run in new.runs] == [
        (SINKS, NATIVE),
        (N_DEEP - SINKS, "q4h"),
        (2 * N_DEEP - TAIL, "q8"),
        (TAIL, NATIVE),
    ]
    assert check_rows(store, path[-1]) == 3 * N_DEEP


def test_a_base_may_ask_for_its_own_format(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Its format beats its level's; with no table in force it alone is re-encoded."""
    path = bases_and_a_leaf(store)
    ids = path[-1].prefix_ids()
    store.bases.add("p", ids[:N_DEEP], "local", 0, False, "native")
    store.bases.add("p/c", ids[: 2 * N_DEEP], "local", 1, False, "q5")
    clock.now += AFTER_S
    assert len(run(shrinker, None)) == 1
    assert [formats_of(store, node)[-1][1] for node in path] == [NATIVE, "q5", NATIVE, NATIVE]
    assert len(run(shrinker)) == 2
    assert [formats_of(store, node)[0][1] for node in path] == [NATIVE, "q5", "q8", "q8"]
    assert len(formats_of(store, path[0])) == 1


def test_the_most_faithful_of_several_requests(
    store: Store, shrinker: Shrinker, clock: Clock
) -> None:
    """Two bases of one level over the same segment."""
    ids = tokens(2 * N_DEEP)
    path = stored(store, ids, N_DEEP, 2 * N_DEEP)
    store.bases.add("a", ids[:N_DEEP], "local", 0, False, "q5h")
    store.bases.add("b", ids, "local", 0, False, "q8ah")
    store.bases.add("c", ids, "local", 1, False, "native")
    clock.now += AFTER_S
    run(shrinker)
    assert formats_of(store, path[0])[-1][1] == "q8ah"
    store.bases.remove("b", "local")
    assert run(shrinker) == []
    assert shrinker.n_kept == 1


def test_a_table_that_changes_keeps_what_there_is(
    store: Store, shrinker: Shrinker, clock: Clock
) -> None:
    """Approximate rows are reported as kept, never encoded a second time."""
    (leaf,) = stored(store, tokens(500))
    clock.now += AFTER_S
    run(shrinker)
    before = leaf.file
    assert run(shrinker, LevelFormats.parse("0=q4h")) == []
    assert leaf.file is before
    assert (shrinker.n_kept, shrinker.n_shrunk) == (1, 1)
    run(shrinker)
    assert shrinker.n_kept == 0


def test_what_was_just_used_waits(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Use moves the moment; so does being read."""
    (leaf,) = stored(store, tokens(500))
    clock.now += AFTER_S - 1
    assert run(shrinker) == []
    store.touch(leaf)
    clock.now += AFTER_S - 1
    assert run(shrinker) == []
    clock.now += 1
    file = leaf.file
    with shrinker.reading([file, None]), shrinker.reading([file]):
        assert run(shrinker) == []
    assert len(run(shrinker)) == 1


def test_nothing_is_done_when_it_is_off(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Without a table and without requests, or disabled."""
    stored(store, tokens(500))
    clock.now += AFTER_S
    assert run(shrinker, None) == []
    shrinker.set_formats(TABLE, enabled=False)
    assert shrinker.step() is None
    assert shrinker.wait_s() == float("inf")
    assert run(shrinker, LevelFormats((NATIVE,))) == []


def test_settled_files_are_not_looked_at_again(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they are used, or the bases change."""
    (leaf,) = stored(store, tokens(500))
    clock.now += AFTER_S
    run(shrinker)
    monkeypatch.setattr(shrink, "SCAN_S", (0.0, 0.0))
    until(lambda: shrinker.wait_s() == 0)
    shrinker.step()

    looked: dict[tuple[SegmentFile, float], None] = {}

    def look(file: SegmentFile, *asked: Any) -> Any:
        looked[file, clock.now] = None
        return differs(file, *asked)

    monkeypatch.setattr(shrink, "differs", look)
    shrinker.step()
    assert not looked
    store.touch(leaf)
    clock.now += AFTER_S
    shrinker.step()
    shrinker.step()
    assert list(looked) == [(leaf.file, clock.now)]
    store.bases.add("b", leaf.prefix_ids(), "local", 0, False, "q4h")
    clock.now += AFTER_S
    shrinker.step()
    assert list(looked)[1:] == [(leaf.file, clock.now)]
    assert shrinker.n_kept == 1


def test_damaged_files_are_set_aside(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Re-encoding finds damage as loading does, and continues with the other files."""
    for seed in range(3):
        stored(store, tokens(500, seed), 500)
    bad = store.nodes()[1].file
    assert bad is not None
    with bad.path.open("r+b") as handle:
        handle.seek(5000)
        handle.write(b"damage")
    clock.now += AFTER_S
    assert len(run(shrinker)) == 2
    assert shrinker.n_damaged == 1
    assert bad.dropped
    store.check_integrity(keys=True)


def test_a_full_disk_stops_it_for_a_while(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is told once, and nothing is tried again at once."""
    (leaf,) = stored(store, tokens(500))
    clock.now += AFTER_S

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(DiskFull):
            run(shrinker)
    assert shrinker.wait_s() > 30
    assert shrinker.step() is None
    assert len(run(shrinker)) == 1
    assert check_rows(store, leaf) == 500


def test_rows_that_no_code_can_hold_stay(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Infinities: that file stays native, and the others are not held up."""
    (leaf,) = store.insert(tokens(500), "local", [500])
    make_hot(store, leaf)
    assert leaf.hot is not None
    (part,) = leaf.hot
    k = part.k[0].copy()
    k[200] = np.full(32, np.inf, np.float16).view(np.uint8)
    store.rows.drop_hot(leaf)
    store.rows.attach_hot([leaf], KVRows(LAYOUT, part.positions, (k,), part.v))
    file = store.rows.write([leaf])
    store.rows.drop_hot(leaf)
    (other,) = stored(store, tokens(500, 1))
    clock.now += AFTER_S
    assert len(run(shrinker)) == 1
    assert leaf.file is file
    assert len(formats_of(store, other)) == 3
    assert store.state.directory.names() == {f.path.name for f in store.files()}


def test_what_is_worth_least_is_squeezed(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more, from its level's format into a smaller one, and for good; sinks, tails and what was
    used lately stay. Nothing grows."""
    names = [stored(store, tokens(500, seed))[-1] for seed in range(3)]
    clock.now += AFTER_S
    run(shrinker)
    before = store.state.warm_bytes
    store.touch(names[1])
    shrinker.set_formats(TABLE, enabled=True, squeezed="q4h")
    assert not shrinker.has_squeezed
    worst = [node.file for node in names[:2] if node.file is not None]
    monkeypatch.setattr(shrink, "SQUEEZE_S", 0.0)
    (new,) = squeeze(shrinker, worst)
    shapes = [formats_of(store, node) for node in names]
    assert shapes[0] == [(SINKS, NATIVE), (500 - SINKS - TAIL, "q4h"), (TAIL, NATIVE)]
    assert shapes[1] == shapes[2] == [(n, name.replace("q4h", "q8")) for n, name in shapes[0]]
    assert names[0].file is new
    assert new.provenance(SINKS, 500 - TAIL).tolist() == [Provenance.APPROXIMATE] * 368
    assert (shrinker.has_squeezed, shrinker.n_squeezed) == (True, 1)
    assert store.state.warm_bytes < before
    clock.now += AFTER_S
    shrinker.set_formats(TABLE, enabled=True, squeezed="q6h")
    assert squeeze(shrinker, [new]) == []
    assert run(shrinker) == []
    store.check_integrity(keys=True)


def squeeze(shrinker: Shrinker, files: list[SegmentFile]) -> list[SegmentFile]:
    """Everything that can be made smaller of these; the new files."""
    done: list[SegmentFile] = []
    asked: list[list[SegmentFile]] = [[], files]

    def squeezed() -> bool:
        found = shrinker.squeeze(lambda: asked.pop() if asked else [])
        done.extend([] if found is None else [found])
        return not asked

    until(squeezed)
    return done


def test_what_was_queued_is_forgotten_when_space_is_not_short(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is due then. What was pinned since it was queued stays as it is."""
    monkeypatch.setattr(shrink, "SCAN_S", (600.0, 600.0))
    monkeypatch.setattr(shrink, "SQUEEZE_S", 0.0)
    leaves = [stored(store, tokens(500, seed))[-1] for seed in (1, 2, 3)]
    clock.now += AFTER_S
    run(shrinker)
    shrinker.set_formats(TABLE, enabled=True, squeezed="q4h")
    until(lambda: shrinker.step() is None and shrinker.wait_s() > 0)
    asked = [leaf.file for leaf in leaves if leaf.file is not None]

    def squeeze_one() -> bool:
        files, asked[:] = list(asked), []
        return shrinker.squeeze(lambda: files) is not None

    until(squeeze_one)
    store.pins.add(leaves[1].id)
    kept = formats_of(store, leaves[1])
    until(lambda: shrinker.wait_s() == 0)
    shrinker.relax()
    assert shrinker.wait_s() > 0
    squeeze(shrinker, [leaves[1].file] if leaves[1].file is not None else [])
    assert formats_of(store, leaves[1]) == kept


def test_the_drift_of_what_was_squeezed_is_kept(store: Store) -> None:
    """Whatever a later calibration finds, and the largest that was ever measured."""
    for name, kl in (("q4h", 0.01), ("q4h", 0.002), ("q6h", 0.001)):
        remember_squeezed(store, SqueezedFormat(name, Drift(kl)))
    assert remember_squeezed(store, None) == {"q4h": Drift(0.01), "q6h": Drift(0.001)}
