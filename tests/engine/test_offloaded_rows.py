"""The offloaded against a dictionary of rows."""

from __future__ import annotations

import errno
import itertools
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_rows import HEAD_SIZE, N_KV, N_LAYER, random_rows
from unnamed import HAS_PROC, unnamed_files

from towerd.engine.embedded.live.descent import Descent
from towerd.engine.embedded.live.offloaded_rows import (
    OffloadedKeys,
    OffloadedRows,
    Pages,
    RowChunk,
    StoredChunk,
    keys_of,
)
from towerd.engine.embedded.live.pages import PageFile, PagesLost
from towerd.kernels.dci import keys_in, make_dci_tree
from towerd.kernels.formats import BY_NAME
from towerd.retention import Positions, Rows
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import shift

INDEXED = range(1, N_LAYER)
"""The layers whose keys are read."""


def files_of(offloaded: OffloadedRows) -> set[PageFile]:
    return {chunk.file for chunk in offloaded.chunks if isinstance(chunk, Pages)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 1 << 30),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(["f16", "bf16", "f32"]),
)
def test_offloaded_rows_are_kept(tmp_path: Path, seed: int, sizes: list[int], name: str) -> None:
    """Rows, places and keys of any positions, after chunks came, were cut and reduced; some
    of them on disk."""
    rng = np.random.default_rng(seed)
    whole = random_rows(rng, name, 0, sum(sizes))
    shift = int(rng.integers(0, 50))  # places need not be positions
    offloaded, start = OffloadedRows(), 0
    there: list[int] = []
    for size in sizes:
        part = whole.slice(start, start + size)
        positions = np.arange(start, start + size) + shift
        numbers = rng.permutation(size)[: int(rng.integers(1, size + 1))]
        chunk = RowChunk.of(part, positions, numbers)
        offloaded = offloaded.add(
            Pages.of(chunk, tmp_path, None, INDEXED) if rng.random() < 0.4 else chunk
        )
        there += (numbers + start + shift).tolist()
        start += size
    before = offloaded
    end = int(rng.integers(shift, shift + start + 1))
    stay = np.flatnonzero(rng.random(start + shift) < 0.7)
    offloaded = offloaded.only(stay).without(end)
    expected = [p for p in sorted(there) if p < end and p in stay]
    offloaded.check_integrity()
    before.check_integrity()
    assert before.positions.tolist() == sorted(there)
    assert offloaded.positions.tolist() == expected
    in_ram = offloaded.in_ram
    n_keys = (len(offloaded) - len(in_ram)) * whole.layout.k[0].row_bytes * len(INDEXED)
    assert offloaded.n_bytes == len(in_ram) * whole.layout.token_bytes + n_keys
    filed = [offloaded.filed(file).tolist() for file in files_of(offloaded)]
    assert sorted([*in_ram.tolist(), *sum(filed, [])]) == expected
    assert offloaded.disk_bytes == sum(file.n_bytes for file in files_of(offloaded))
    oldest = offloaded.oldest_file()
    assert (oldest is None) == (not filed)
    assert oldest is None or offloaded.filed(oldest)[0] == min(map(min, filed))
    assert not list(tmp_path.iterdir())  # no file has a name
    if not expected:
        return
    wanted = np.array(expected)[rng.random(len(expected)) < 0.6]
    assert offloaded.n_reads(offloaded.positions) <= len(offloaded)
    if not len(wanted):
        return
    check_rows(offloaded, wanted, whole, shift)
    check_groups(
        offloaded, rng.permuted(np.tile(expected, (N_LAYER, N_KV, 1)), axis=2), whole, shift
    )
    check_keys(offloaded, wanted, keys_of(whole, HEAD_SIZE)[:, :, wanted - shift])


def check_keys(offloaded: OffloadedRows, wanted: Positions, expected: Rows) -> None:
    """The keys of the positions `wanted`, decoded and where they lie."""
    keys, span = (OffloadedKeys(offloaded, HEAD_SIZE, slice(i, None)) for i in (0, 1))
    assert keys.shape == (N_LAYER, N_KV, len(offloaded), HEAD_SIZE)
    numbers = np.searchsorted(offloaded.positions, wanted)
    for layer, head in itertools.product(INDEXED, range(N_KV)):
        assert np.array_equal(keys.read(layer, head, numbers), expected[layer, head])
        tree, plain = make_dci_tree(HEAD_SIZE), make_dci_tree(HEAD_SIZE)
        tree.add(keys.at(layer, head, numbers))
        plain.add(keys_in(expected[layer, head]))
        assert tree.pages().tolist() == plain.pages().tolist()
        if numbers[-1] > 0:
            last = numbers[-1:]
            assert np.array_equal(span.read(layer, head, last - 1), keys.read(layer, head, last))


def check_rows(offloaded: OffloadedRows, wanted: Positions, whole: KVRows, shift: int) -> None:
    rows = offloaded.rows(wanted)
    assert rows.positions.tolist() == wanted.tolist()
    assert offloaded.places(wanted).tolist() == (wanted - shift).tolist()
    for mine, theirs in zip(rows.planes(), whole.planes(), strict=True):
        assert np.array_equal(mine, theirs[wanted - shift])


def check_groups(offloaded: OffloadedRows, groups: Positions, whole: KVRows, shift: int) -> None:
    """Each layer and KV head has rows of its own positions."""
    groups = np.sort(groups[..., :2])
    mixed = offloaded.mixed(groups, np.arange(groups.shape[2]))
    for i, (mine, theirs) in enumerate(zip(mixed.planes(), whole.planes(), strict=True)):
        parts = np.split(theirs, N_KV, axis=1)
        mixture = [parts[head][groups[i % N_LAYER, head] - shift] for head in range(N_KV)]
        assert np.array_equal(mine, np.concatenate(mixture, axis=1))


def test_rows_without_values(tmp_path: Path) -> None:
    """Models with latent attention cache keys alone: each layer has rows of its own positions."""
    rows = random_rows(np.random.default_rng(3), "f16", 0, 12)
    layout = KVLayout(rows.layout.k, ())
    latent = KVRows(layout, rows.positions, rows.k, ())
    every = np.arange(12)
    chunk = RowChunk.of(latent, every, every[::-1])
    groups = np.array([[[0, 1]], [[4, 9]], [[2, 11]]])
    for offloaded in (
        OffloadedRows().add(chunk),
        OffloadedRows().add(Pages.of(chunk, tmp_path, None, INDEXED)),
    ):
        mixed = offloaded.mixed(groups, np.arange(2))
        assert not mixed.v
        for layer, k in enumerate(mixed.k):
            assert np.array_equal(k, rows.k[layer][groups[layer, 0]])


def chunks_of(rows: KVRows, folder: Path) -> OffloadedRows:
    """The same rows in RAM, on disk and in the store, a third each, in any order."""
    n, rng = len(rows) // 3, np.random.default_rng(n_rows := len(rows))
    offloaded = OffloadedRows().add(StoredChunk(rows, np.arange(n)))
    for i, start in enumerate((n, 2 * n)):
        end = start + n if i == 0 else n_rows
        part, order = rows.slice(start, end), rng.permutation(end - start)
        chunk = RowChunk.of(part, np.arange(start, end), order)
        offloaded = offloaded.add(chunk if i else Pages.of(chunk, folder, None, INDEXED))
    return offloaded


@pytest.mark.parametrize("down", [50, 60, 85])
def test_rows_go_down(tmp_path: Path, down: int) -> None:
    """A piece at a time, those of every kind of chunk: rows, keys and places are those of rows that are
    turned together, and the chunks that they come from are as they were."""
    rope = Rope((LayerRope("neox", HEAD_SIZE, HEAD_SIZE),) * N_LAYER)
    rows = random_rows(np.random.default_rng(down), "f16", 0, 99)
    every = np.arange(99)
    places = np.where(every >= down, every - down, every)
    high = rows.slice(down, 99)
    low = shift(high, 0, rope)
    before, descent = chunks_of(rows, tmp_path), Descent(down, rope, rot_k=False)
    after, n_steps = before, 0
    while (lowered := after.lowered(descent, INDEXED, 1)) is not None:
        after, n_steps = lowered, n_steps + 1
        after.check_integrity()
        assert np.array_equal(after.positions, every)
    assert n_steps == len({0 if p < 33 else 1 if p < 66 else 2 for p in range(down, 99)})
    check_rows(before, every, rows, 0)
    assert np.array_equal(after.places(every), places)
    assert np.array_equal(after.in_ram, before.in_ram)
    assert np.array_equal(after.in_files, before.in_files)
    some = every[every % 3 > 0]
    for offloaded, wanted in (
        (after, some),
        (after.only(some), some),
        (after.without(90), every[:90]),
    ):
        found = offloaded.rows(wanted)
        expected = KVRows(
            rows.layout,
            rows.positions,
            tuple(
                np.concatenate([k[:down], k_low]) for k, k_low in zip(rows.k, low.k, strict=True)
            ),
            rows.v,
        )
        for mine, theirs in zip(found.planes(), expected.planes(), strict=True):
            assert np.array_equal(mine, theirs[wanted])
        numbers = np.searchsorted(offloaded.positions, wanted)
        read = OffloadedKeys(offloaded, HEAD_SIZE)
        keys = keys_of(expected, HEAD_SIZE)
        for layer, head in itertools.product(INDEXED, range(N_KV)):
            assert np.array_equal(read.read(layer, head, numbers), keys[layer, head][wanted])


@pytest.mark.parametrize("kind", ["paged", "turned"])
def test_groups_are_read_in_pieces(tmp_path: Path, kind: str) -> None:
    """Where every layer and KV head wants other rows of a large chunk, it is not read whole at once."""
    n, m, n_layer, plane = (
        12000,
        1500,
        4,
        Plane(BY_NAME["f16"].ggml_type, BY_NAME["f16"].row_bytes(128)),
    )
    rng = np.random.default_rng(8)
    layout, every = KVLayout((plane,) * n_layer, (plane,) * n_layer), np.arange(n)
    values = rng.standard_normal((2 * n_layer, n, 128), dtype=np.float32).astype(np.float16)
    planes = tuple(each.view(np.uint8) for each in values)
    rows = KVRows(layout, every.astype(np.int32), planes[:n_layer], planes[n_layer:])
    chunk = RowChunk.of(rows, every, every)
    offloaded = OffloadedRows().add(Pages.of(chunk, tmp_path, None, range(1)))
    if kind == "turned":
        rope = Rope((LayerRope("neox", 64, 64),) * n_layer)
        descent = Descent(n // 2, rope, rot_k=False)
        lowered = offloaded.lowered(descent, range(1), 1)
        assert lowered is not None
        offloaded, every = lowered, every[n // 2 :]
    groups = rng.permuted(np.tile(every, (n_layer, 2, 1)), axis=2)[..., :m]
    groups = np.sort(groups)
    offloaded.mixed(groups[..., :2], np.arange(2))  # what is imported and cached is there
    tracemalloc.start()
    mixed = offloaded.mixed(groups, np.arange(m))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    n_wanted = len(np.unique(groups))
    assert n_wanted > 5000
    assert peak < (m + n_wanted) * layout.token_bytes
    v = values[n_layer:].reshape(n_layer, n, 2, 64)
    for layer, head in itertools.product(range(n_layer), range(2)):
        found = mixed.v[layer].view(np.float16).reshape(m, 2, 64)[:, head]
        assert np.array_equal(found, v[layer, groups[layer, head], head])


def paged(folder: Path, n: int) -> tuple[Pages, KVRows]:
    rows = random_rows(np.random.default_rng(n), "f16", 0, n)
    return Pages.of(RowChunk.of(rows, np.arange(n), np.arange(n)), folder, None, INDEXED), rows


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc")
def test_a_file_is_gone_with_its_last_rows(tmp_path: Path) -> None:
    pages, rows = paged(tmp_path, 700)
    assert len(unnamed_files(tmp_path)) == 1
    some = pages.take(np.array([600, 3, 4, 5], np.int64))
    del pages
    planes, _ = some.read(np.array([2, 0, 3], np.int64))
    for mine, theirs in zip(planes, rows.planes(), strict=True):
        assert np.array_equal(mine, theirs[[4, 600, 5]])
    del some
    assert not unnamed_files(tmp_path)


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc")
def test_damage_on_disk_is_told(tmp_path: Path) -> None:
    """Other bytes, and fewer."""
    pages, _ = paged(tmp_path, 20)
    (fd,) = unnamed_files(tmp_path)
    every = np.arange(20)
    os.pwrite(fd, b"\x7f" * 3, 7 * pages.file.row_bytes + 5)
    with pytest.raises(PagesLost, match="damaged"):
        pages.read(every)
    pages.read(every[8:])
    os.ftruncate(fd, 15 * pages.file.row_bytes)
    pages.read(every[8:15])
    with pytest.raises(PagesLost, match="shorter"):
        pages.read(every[8:16])


def test_reads_may_give_less_than_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two records and a part of the third each time: nothing is lost, nothing is read wrong."""
    pages, rows = paged(tmp_path, 20)
    whole = os.preadv

    def some(fd: int, pieces: list[memoryview], offset: int) -> int:
        return whole(fd, [*pieces[:2], *(piece[:5] for piece in pieces[2:3])], offset)

    monkeypatch.setattr(os, "preadv", some)
    wanted = np.array([19, *range(3, 12), 0, 1], np.int64)
    planes, _ = pages.read(wanted)
    for mine, theirs in zip(planes, rows.planes(), strict=True):
        assert np.array_equal(mine, theirs[wanted])


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc")
def test_rows_are_added_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays; a disk that is full in between takes nothing for good."""
    first, rows = paged(tmp_path, 9)
    chunk = RowChunk.of(rows, np.arange(9, 18), np.arange(9)[::-1])
    (fd,) = unnamed_files(tmp_path)
    n_bytes, write = os.fstat(fd).st_size, os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset > n_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:100], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            Pages.of(chunk, tmp_path, first.file, INDEXED)
    assert os.fstat(fd).st_size == n_bytes == first.file.n_bytes
    second = Pages.of(chunk, tmp_path, first.file, INDEXED)
    assert second.file is first.file
    assert first.file.n_bytes == 2 * n_bytes
    every = np.arange(9)
    for mine, later, theirs in zip(
        first.read(every)[0], second.read(every)[0], rows.planes(), strict=True
    ):
        assert np.array_equal(mine, theirs)
        assert np.array_equal(later, theirs[::-1])


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        paged(tmp_path, 4)
