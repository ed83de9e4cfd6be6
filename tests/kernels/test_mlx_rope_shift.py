"""RoPE shift in MLX against the numpy reference.

`ops` are plain MLX operations on whatever MLX has here. `metal` is the Metal text: on an Apple GPU,
elsewhere compiled by the C++ compiler (metal_on_cpu.py); both go through the public functions.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lab import reference
from lab.reference.blocks import IQ4_NL, IQ4_NL_LEAST
from towerd.kernels import dispatch
from towerd.kernels.arrays import Bytes, Floats, Lines
from towerd.kernels.formats import BY_NAME, CACHE_FORMATS, Format

mx: Any = pytest.importorskip("mlx.core")
metal: Any = pytest.importorskip("towerd.kernels.mlx.metal")
mlx_kernels: Any = pytest.importorskip("towerd.kernels.mlx.kernels")

from mlx_rows import (  # noqa: E402  # needs MLX
    GEOMETRIES,
    HAS_GPU,
    Heads,
    check_rows,
    ones,
    rows_of,
    table_of,
)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("row", CACHE_FORMATS, ids=lambda row: row.name)
def test_rope_shift(backend: str, row: Format, geometry: str) -> None:
    """Rows that move by different distances, and one that stays."""
    heads = GEOMETRIES[geometry]
    rows = rows_of(row, 5, heads.n * heads.head_dim, seed=row.type_id)
    cos, sin = table_of(heads.n_rot, 3)
    table = np.array([0, 2, -1, 1, 1], np.int32)
    check_shift(row, heads, rows, cos, sin, table)


def check_shift(
    row: Format, heads: Heads, rows: Bytes, cos: Floats, sin: Floats, table: Lines | None
) -> None:
    block = heads.hadamard_block if row.is_quantized else 0
    where = (heads.head_dim, heads.n_rot, heads.first, heads.neox, block)
    want = np.empty_like(rows)
    reference.rope_shift(rows, want, row.name, cos, sin, table, *where)
    got = np.empty_like(rows)
    mlx_kernels.rope_shift(rows, got, row.name, cos, sin, table, *where)
    check_rows(row, got, want)
    stays = np.zeros(len(rows), np.bool_) if table is None else table < 0
    assert np.array_equal(got[stays], rows[stays])


@pytest.mark.parametrize(
    "row", [row for row in CACHE_FORMATS if row.is_quantized], ids=lambda row: row.name
)
def test_rope_shift_encodes_as_ggml(backend: str, row: Format) -> None:
    """Ones times a table that is no rotation: any number, so also ties and zeros of both signs."""
    rng = np.random.default_rng(1)
    ties = np.arange(-15.5, 16.5, dtype=np.float32)
    between = (IQ4_NL[:-1] + IQ4_NL[1:]) / 2
    zeros = np.zeros(32, np.float32)
    values = [
        np.append(ties[1:], -127.0),
        np.append(ties[1:], 127.0),
        np.concatenate([between, -between, [-127, 127]]),
        np.concatenate([between, -between, [127, -127]]),
        np.where(np.arange(32) % 3 == 1, -zeros, zeros),
        np.where(np.arange(32) % 3 == 0, -zeros, 5.0),
        np.where(np.arange(32) == 9, -zeros, np.where(np.arange(32) == 4, zeros, 2.0)),
        np.full(32, -60000.0),
        rng.standard_normal(32) * 1e-6,
        rng.standard_normal(32) * 1e-17,
        *(rng.integers(-8, 8, (40, 32)) / 2),
        *rng.standard_normal((40, 32)),
    ]
    cos = np.array(values, np.float32)
    heads = Heads(1, 64, 64, 0, True, 0)
    lines = np.arange(len(cos), dtype=np.int32)
    check_shift(row, heads, ones(row, len(cos), 64), cos, np.zeros_like(cos), lines)


def test_rope_shift_of_wide_rows(backend: str) -> None:
    """A row of more elements than a threadgroup takes at once; one line for all rows."""
    row = BY_NAME["q8_0"]
    heads = Heads(40, 128, 128, 0, True, 128)
    rows = rows_of(row, 2, heads.n * heads.head_dim)
    check_shift(row, heads, rows, *table_of(heads.n_rot, 1), None)


def test_rope_shift_copies_what_does_not_move(backend: str) -> None:
    """NaN payloads and denormals outside the rotated elements keep their bits."""
    raw = np.random.default_rng(3).integers(0, 2**16, (4, 2 * 64)).astype(np.uint16)
    raw.reshape(4, 2, 64)[:, :, 16:48] = 0x3C00
    cos, sin = table_of(32, 1)
    got = np.empty_like(raw)
    where = (64, 32, 16, True, 0)
    mlx_kernels.rope_shift(raw.view(np.uint8), got.view(np.uint8), "f16", cos, sin, None, *where)
    after = got.reshape(4, 2, 64)
    before = raw.reshape(4, 2, 64)
    for kept in (slice(0, 16), slice(48, 64)):
        assert np.array_equal(after[:, :, kept], before[:, :, kept])
    assert not np.array_equal(after, before)


def test_geometries_without_a_kernel(backend: str) -> None:
    """Rotated rows that are not quantized, and heads that no threadgroup holds, take operations."""
    f16, q8_0 = BY_NAME["f16"], BY_NAME["q8_0"]
    assert not metal.can_rope_shift(f16, 128, 128)
    assert not metal.can_rope_shift(q8_0, 16384, 0)
    assert metal.can_rope_shift(q8_0, 576, 64)
    cos, sin = table_of(128, 1)
    for row, head_dim, block in ((f16, 128, 128), (q8_0, 16384, 0)):
        rows = rows_of(row, 2, head_dim)
        where = (head_dim, 128, 0, True, block)
        want = np.empty_like(rows)
        reference.rope_shift(rows, want, row.name, cos, sin, None, *where)
        got = np.empty_like(rows)
        mlx_kernels.rope_shift(rows, got, row.name, cos, sin, None, *where)
        check_rows(row, got, want)


def test_no_rows_to_shift(backend: str) -> None:
    """Nothing in, nothing out."""
    empty, cos = np.zeros((0, 128 * 2), np.uint8), np.zeros((1, 64), np.float32)
    out = np.zeros_like(empty)
    mlx_kernels.rope_shift(empty, out, "f16", cos, cos, None, 128, 128, 0, True, 0)


def test_adapters(backend: str) -> None:
    """What dispatch calls: rows any distance apart, at any address, into numpy memory."""
    heads, row = GEOMETRIES["neox partial"], BY_NAME["q5_1"]
    tight = rows_of(row, 6, heads.n * heads.head_dim)
    memory = np.zeros((6, tight.shape[1] + 5), np.uint8)
    rows = memory[:, 3 : 3 + tight.shape[1]]
    rows[:] = tight
    cos, sin = table_of(heads.n_rot, 2)
    table = np.array([1, -1, 0, 1, 0, 0], np.int32)
    where = (heads.head_dim, heads.n_rot, heads.first, heads.neox, heads.hadamard_block)
    want, got = np.empty_like(tight), np.zeros_like(memory)
    reference.rope_shift(rows, want, row.name, cos, sin, table, *where)
    out = got[:, : tight.shape[1]]
    mlx_kernels.rope_shift(rows, out, row.name, cos, sin, table, *where, n_threads=2)
    check_rows(row, np.ascontiguousarray(out), want)
    assert not got[:, tight.shape[1] :].any()


def test_many_threads(backend: str) -> None:
    """Workers call the kernel at the same time; MLX has a stream for each."""
    if backend == "metal" and not HAS_GPU:
        pytest.skip("the stand-in runs one kernel at a time")
    heads, row = GEOMETRIES["llama"], BY_NAME["q8_0"]
    rows = rows_of(row, 8, heads.n * heads.head_dim)
    cos, sin = table_of(heads.n_rot, 1)
    where = (heads.head_dim, heads.n_rot, heads.first, heads.neox, heads.hadamard_block)
    want = np.empty_like(rows)
    reference.rope_shift(rows, want, row.name, cos, sin, None, *where)

    def shift(_: int) -> Bytes:
        out = np.empty_like(rows)
        mlx_kernels.rope_shift(rows, out, row.name, cos, sin, None, *where)
        return out

    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(shift, range(16)):
            check_rows(row, out, want)


BAD_SHIFTS: dict[str, dict[str, Any]] = {
    "src": {"src": np.zeros((2, 33), np.uint8)},
    "out": {"out": np.zeros((2, 34), np.uint8)},
    "format": {"format": "q8h"},
    "cos": {"cos": np.zeros((1, 31), np.float32)},
    "sin": {"sin": np.full((1, 32), np.nan, np.float32)},
    "row_table": {"row_table": np.array([0, 1], np.int32)},
    "head_dim": {"head_dim": 48},
    "n_rot": {"n_rot": 63},
    "first": {"first": 1},
    "neox": {"neox": 1},
    "hadamard_block": {"hadamard_block": 128},
    "n_threads": {"n_threads": 0},
}


@pytest.mark.parametrize("name", BAD_SHIFTS)
def test_adapter_refuses_what_the_cpp_refuses(backend: str, name: str) -> None:
    """The same ValueError, and nothing written."""
    rows = np.zeros((2, 68), np.uint8)
    table = np.zeros((1, 32), np.float32)
    out = np.full_like(rows, 7)
    arguments: dict[str, Any] = {
        "src": rows,
        "out": out,
        "format": "q8_0",
        "cos": table,
        "sin": table,
        "row_table": None,
        "head_dim": 64,
        "n_rot": 64,
        "first": 0,
        "neox": True,
        "hadamard_block": 64,
        "n_threads": 1,
    } | BAD_SHIFTS[name]
    with pytest.raises(ValueError, match=f"^{name}: ") as expected:
        dispatch.rope_shift(**arguments)
    with pytest.raises(ValueError, match=f"^{re.escape(str(expected.value))}$"):
        mlx_kernels.rope_shift(**arguments)
    assert (out == 7).all()


@pytest.mark.parametrize("raw", [0x7C00, 0xFC00, 0x7E01])
def test_adapter_refuses_scales_that_are_not_finite(raw: int) -> None:
    """In a row that moves; a row that stays is copied whatever it holds."""
    rows = rows_of(BY_NAME["q4_1"], 3, 64)
    rows[1, 22:24] = np.array([raw], np.uint16).view(np.uint8)
    cos, sin = table_of(64, 1)
    out = np.full_like(rows, 7)
    where = (64, 64, 0, True, 64)
    with pytest.raises(ValueError, match="src: row 1 is not finite"):
        mlx_kernels.rope_shift(rows, out, "q4_1", cos, sin, None, *where)
    assert (out == 7).all()
    table = np.array([0, -1, 0], np.int32)
    mlx_kernels.rope_shift(rows, out, "q4_1", cos, sin, table, *where)
    assert np.array_equal(out[1], rows[1])


def test_text_agrees_with_python() -> None:
    """The constants that the Metal text repeats."""
    text = "".join(path.read_text() for path in sorted(metal.FOLDER.glob("*.metal")))
    constants = dict(re.findall(r"constexpr constant int (k\w+) = (\d+);", text))
    assert constants == {"kThreads": str(metal.THREADS)}
    (table,) = re.findall(r"kTable\[16\] = \{(.*?)\}", text)
    assert [float(value) for value in table.split(",")] == IQ4_NL.tolist()
    assert np.float32(re.findall(r">= (\S+)f;", text)[0]) == IQ4_NL_LEAST
