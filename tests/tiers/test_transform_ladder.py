"""When rows are transform-coded: after block formats, after longer disuse, at once where space is short."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformed import (
    IDENTITY,
    IDS,
    WIDTH,
    basis,
    coded_rows_of,
    library_decodes,
    planes_of,
    same,
    transform,
    written,
)
from waiting import until

from towerd.codec.rows import coded
from towerd.slots.layout import NATIVE
from towerd.slots.rows import KVRows
from towerd.store import Node, Store
from towerd.store.rows.recoding import STEP_ROWS, CodingInterrupted
from towerd.system.priority import NICE
from towerd.tiers import shrink
from towerd.tiers.formats.calibration import FormatCost
from towerd.tiers.formats.fidelity import Fidelity, LevelFormats
from towerd.tiers.formats.transform import TransformCost
from towerd.tiers.manager import Tiers
from towerd.tiers.shrink import SINKS, TAIL, Shrinker

N = 900
AFTER_S, LONGER_S = 10.0, 100.0
Q8 = LevelFormats(("q8",))
CODED = LevelFormats((transform("small"), transform()))
INNER = N - SINKS - TAIL


class Clock:
    """A clock that stands until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(tmp_path / "store", IDENTITY, clock=clock) as opened:
        opened.rows.bases.add(basis())
        yield opened


@pytest.fixture
def shrinker(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Shrinker:
    monkeypatch.setattr(shrink, "SCAN_S", (0.0, 0.0))
    monkeypatch.setattr(shrink, "BUSY_S", 0.0)
    found = Shrinker(store, AFTER_S, clock, LONGER_S)
    found.set_formats(Q8, enabled=True, transform=CODED)
    return found


def steps_until(shrinker: Shrinker, is_so: Callable[[], bool]) -> None:
    def step() -> bool:
        shrinker.step()
        return is_so()

    until(step)


def formats(leaf: Node) -> list[tuple[int, str]]:
    assert leaf.file is not None
    return [(run.n_rows, run.format) for run in leaf.file.runs]


def test_blocks_first_and_codings_after_longer_disuse(
    store: Store, shrinker: Shrinker, clock: Clock
) -> None:
    leaf = written(store, N)
    clock.now += AFTER_S
    steps_until(shrinker, lambda: formats(leaf)[1:2] == [(INNER, "q8")])
    used = written(store, N, seed=1)
    clock.now += LONGER_S
    store.touch(used)
    steps_until(shrinker, lambda: formats(leaf)[1:2] == [(INNER, transform())])
    assert formats(leaf) == [(SINKS, NATIVE), (INNER, transform()), (TAIL, NATIVE)]
    assert formats(used) == [(N, NATIVE)]
    assert (shrinker.n_shrunk, shrinker.n_transformed) == (1, 1)
    clock.now += LONGER_S
    steps_until(shrinker, lambda: shrinker.n_transformed == 2)
    assert shrinker.n_shrunk == 1  # straight out of native rows
    inner = library_decodes(coded_rows_of(N, seed=1), SINKS, N - TAIL)
    assert same(planes_of(store, used, SINKS, N - TAIL), inner)
    for _ in range(5):
        assert shrinker.step() is None
    store.check_integrity(keys=True)


def test_what_is_shared_takes_its_own_coding(
    store: Store, shrinker: Shrinker, clock: Clock
) -> None:
    """And what is precached in a format of its own keeps that."""
    leaf = written(store, 400, N)
    ids = leaf.prefix_ids()
    store.bases.add("p", ids[:400], "local", 0, False)
    clock.now += LONGER_S
    steps_until(shrinker, lambda: shrinker.n_transformed > 0)
    assert formats(leaf) == [
        (SINKS, NATIVE), (400 - SINKS, transform("small")), (N - 400 - TAIL, transform()), (TAIL, NATIVE),
    ]  # fmt: skip
    other = written(store, N, seed=1)
    store.bases.add("q", other.prefix_ids(), "local", 0, False, "native")
    clock.now += LONGER_S
    for _ in range(5):
        shrinker.step()
    assert formats(other) == [(N, NATIVE)]


def test_a_request_interrupts_it_and_nothing_is_done_twice(
    store: Store, shrinker: Shrinker, clock: Clock
) -> None:
    leaf = written(store, N)
    asked = 0

    def pause() -> None:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:
            raise CodingInterrupted

    shrinker.pause = pause
    clock.now += LONGER_S
    steps_until(shrinker, lambda: shrinker.n_transformed == 1)
    n_steps = math.ceil(INNER / STEP_ROWS)
    assert (
        n_steps < asked <= 3 * n_steps
    )  # each attempt asks before it begins, for a piece, and in vain
    inner = library_decodes(coded_rows_of(N), SINKS, N - TAIL)
    assert same(planes_of(store, leaf, SINKS, N - TAIL), inner)


def test_while_a_request_runs_no_file_is_read_for_it(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pause() -> None:
        raise CodingInterrupted

    shrinker.pause = pause
    leaf, verify, n_read = written(store, N), store.rows.verify, 0

    def verified(*args: Any) -> None:
        nonlocal n_read
        n_read += 1
        verify(*args)

    monkeypatch.setattr(store.rows, "verify", verified)
    clock.now += LONGER_S
    for _ in range(5):
        assert shrinker.step() is None
    assert n_read == 0
    shrinker.pause = lambda: None
    steps_until(shrinker, lambda: formats(leaf)[1:2] == [(INNER, transform())])
    assert n_read == 1


def test_it_is_what_is_squeezed_into(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also out of block formats, and before its time."""
    monkeypatch.setattr(shrink, "SQUEEZE_S", 0.0)
    leaf = written(store, N)
    clock.now += AFTER_S
    steps_until(shrinker, lambda: shrinker.n_shrunk == 1)

    def squeezed() -> bool:
        files = [] if leaf.file is None else [leaf.file]
        return shrinker.squeeze(lambda: files) is not None

    until(squeezed)
    assert formats(leaf)[1] == (INNER, transform())
    assert not shrinker.has_squeezed  # its drift is known by itself


def test_work_that_takes_turns_with_it_loses_nothing(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space is short, and a request interrupts after each piece: one file is coded because of its age, one
    for the space, and neither is begun anew for the other."""
    monkeypatch.setattr(shrink, "SQUEEZE_S", 0.0)
    old = written(store, N)
    clock.now += LONGER_S - AFTER_S
    young = written(store, N, seed=1)
    clock.now += AFTER_S
    asked = 0

    def pause() -> None:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:  # an attempt asks before it begins, too
            raise CodingInterrupted

    shrinker.pause = pause

    def both() -> bool:
        shrinker.step()
        shrinker.squeeze(lambda: [] if young.file is None else [young.file])
        return shrinker.n_transformed == 2

    until(both)
    n_pieces = math.ceil(INNER / STEP_ROWS)
    assert asked <= 9 * n_pieces + 3  # the young one is put into a block format in the middle of it
    assert formats(old)[1] == formats(young)[1] == (INNER, transform())


def test_a_base_that_is_gone_is_noticed(store: Store, shrinker: Shrinker, clock: Clock) -> None:
    """Also if others looked at the bases before the next scan did."""
    leaf = written(store, N)
    store.bases.add("p", leaf.prefix_ids(), "local", 0, False, "native")
    clock.now += AFTER_S
    for _ in range(5):
        assert shrinker.step() is None
    store.bases.remove("p", "local")
    shrinker.requests_for([])
    steps_until(shrinker, lambda: formats(leaf)[1:2] == [(INNER, "q8")])


def test_another_table_may_come_while_rows_are_coded(
    store: Store, shrinker: Shrinker, clock: Clock
) -> None:
    """In the middle of what is done for want of space; that begins anew with it."""
    wrong = coded_rows_of(N)
    wrong.plane(0)[600] = np.full(2 * WIDTH // 2, np.inf, np.float16).view(np.uint8)
    ids = (IDS[:N] + 5000).astype(np.int32)
    leaves = [store.insert(ids, "local", [N])[-1], written(store, N)]
    store.rows.attach_hot(leaves[0].path(), wrong)
    files = [store.rows.write(leaves[0].path()), leaves[1].file]
    clock.now += AFTER_S
    shrinker.pause = lambda: shrinker.set_formats(Q8, enabled=True, transform=CODED)
    assert shrinker.squeeze(lambda: [file for file in files if file]) is not None
    assert formats(leaves[0]) == [(N, NATIVE)]  # infinities cannot be coded
    assert formats(leaves[1])[1] == (INNER, transform())


def test_what_nobody_expected_is_not_tried_again_at_once(
    store: Store, clock: Clock, shrinker: Shrinker
) -> None:
    """A coding that its basis does not have."""
    shrinker.set_formats(Q8, enabled=True, transform=LevelFormats((transform("none"),)))
    leaf = written(store, N)
    clock.now += LONGER_S
    with pytest.raises(KeyError):
        shrinker.step()
    assert shrinker.wait_s() > 0
    assert formats(leaf) == [(N, NATIVE)]


def test_it_pauses_before_every_page_and_has_a_low_priority(
    store: Store, shrinker: Shrinker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a request waits no longer than a page takes."""
    done, encode = list[object](), coded.encode

    def encoded(rows: KVRows, *args: Any, **how: Any) -> bytes:
        done.append(len(rows))
        if sys.platform == "linux":
            thread = threading.get_native_id()
            assert os.getpriority(os.PRIO_PROCESS, thread) >= NICE
        return encode(rows, *args, **how)

    monkeypatch.setattr(coded, "encode", encoded)
    shrinker.pause = lambda: done.append("pause")
    leaf = written(store, N)
    clock.now += LONGER_S
    steps_until(shrinker, lambda: formats(leaf)[1:2] == [(INNER, transform())])
    assert done[0] == "pause"  # before the file is read
    assert done[1::2] == ["pause"] * math.ceil(INNER / 64)
    assert done[2::2] == [64] * (INNER // 64)


@pytest.mark.parametrize(("fidelity", "after_s"), [("exact", 0.0), ("near", -1.0)])
def test_it_can_be_ruled_out(
    store: Store, clock: Clock, fidelity: Fidelity, after_s: float
) -> None:
    leaf = written(store, N)
    tiers = Tiers(
        store, IDENTITY.layout, v_trans=False, hot_bytes=1 << 20, warm_bytes=1 << 20, policy="lru",
        fidelity=fidelity, shrink_after_s=0.0, transform_after_s=after_s, clock=clock,
    )  # fmt: skip
    cost = FormatCost(0.004, 0.001, 0.0, 0.97, 8.0, 1024)
    tiers.set_transform(TransformCost((transform(),), cost, 2.0, 0.002))
    tiers.flush()
    tiers.close()
    assert formats(leaf) == [(N, NATIVE)]
