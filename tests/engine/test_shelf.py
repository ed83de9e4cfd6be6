"""The shelf against a dictionary of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from towerd.engine.embedded.keys import keys_of
from towerd.engine.embedded.shelf import Chunk, Shelf, ShelfKeys
from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import Bytes2D, KVRows

HEAD_SIZE, N_KV, N_LAYER = 4, 2, 3


def random_rows(rng: np.random.Generator, name: str, p0: int, n: int) -> KVRows:
    plane = Plane(BY_NAME[name].ggml_type, BY_NAME[name].row_bytes(HEAD_SIZE * N_KV))
    layout = KVLayout((plane,) * N_LAYER, (plane,) * N_LAYER)

    def planes() -> tuple[Bytes2D, ...]:
        values = rng.standard_normal((N_LAYER, n, HEAD_SIZE * N_KV), dtype=np.float32)
        if name == "f32":
            return tuple(np.ascontiguousarray(each).view(np.uint8) for each in values)
        if name == "f16":
            return tuple(each.astype(np.float16).view(np.uint8) for each in values)
        short = (values.view(np.uint32) >> 16).astype(np.uint16)
        return tuple(np.ascontiguousarray(each).view(np.uint8) for each in short)

    return KVRows(layout, np.arange(p0, p0 + n, dtype=np.int32), planes(), planes())


@given(
    st.integers(0, 1 << 30),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(["f16", "bf16", "f32"]),
)
def test_what_was_shelved_is_there(seed: int, sizes: list[int], name: str) -> None:
    """Rows, places and keys of any positions, after chunks came, were cut and were thinned."""
    rng = np.random.default_rng(seed)
    whole = random_rows(rng, name, 0, sum(sizes))
    shift = int(rng.integers(0, 50))  # places need not be positions
    shelf, start = Shelf(), 0
    there: list[int] = []
    for size in sizes:
        part = whole.slice(start, start + size)
        positions = np.arange(start, start + size) + shift
        numbers = rng.permutation(size)[: int(rng.integers(1, size + 1))]
        shelf = shelf.add(Chunk.of(part, positions, numbers))
        there += (numbers + start + shift).tolist()
        start += size
    before = shelf
    end = int(rng.integers(shift, shift + start + 1))
    stay = np.flatnonzero(rng.random(start + shift) < 0.7)
    shelf = shelf.only(stay).without(end)
    expected = [p for p in sorted(there) if p < end and p in stay]
    shelf.check_integrity()
    before.check_integrity()
    assert before.positions.tolist() == sorted(there)
    assert shelf.positions.tolist() == expected
    assert shelf.n_bytes == len(expected) * whole.layout.token_bytes
    if not expected:
        return
    wanted = np.array(expected)[rng.random(len(expected)) < 0.6]
    assert shelf.n_reads(shelf.positions) <= len(shelf)
    if not len(wanted):
        return
    rows = shelf.rows(wanted)
    assert rows.positions.tolist() == (wanted - shift).tolist()
    for mine, theirs in zip(rows.planes(), whole.planes(), strict=True):
        assert np.array_equal(mine, theirs[wanted - shift])
    keys, every = ShelfKeys(shelf, HEAD_SIZE), keys_of(whole, HEAD_SIZE)
    assert keys.shape == (N_LAYER, N_KV, len(shelf), HEAD_SIZE)
    numbers = np.searchsorted(shelf.positions, wanted)
    for layer in range(N_LAYER):
        for head in range(N_KV):
            assert np.array_equal(keys[layer, head, numbers], every[layer, head, wanted - shift])
    span = ShelfKeys(shelf, HEAD_SIZE, slice(1, None))
    if len(shelf) > 1:
        assert np.array_equal(span[0, 0, np.array([0])], keys[0, 0, np.array([1])])
