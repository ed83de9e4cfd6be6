"""Decoding and Hadamard transform in MLX, against the numpy reference, and arrays that MLX shares.

`ops` are plain MLX operations on whatever MLX has here. `metal` is the Metal text: on an Apple GPU,
elsewhere compiled by the C++ compiler (metal_on_cpu.py); both go through the public functions.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from towerd.kernels import reference
from towerd.kernels.formats import FORMATS, Format
from towerd.kernels.reference.blocks import IQ4_NL, IQ4_NL_LEAST
from towerd.kernels.reference.checks import Floats

mx: Any = pytest.importorskip("mlx.core")
arrays: Any = pytest.importorskip("towerd.kernels.mlx.arrays")
metal: Any = pytest.importorskip("towerd.kernels.mlx.metal")
mlx_kernels: Any = pytest.importorskip("towerd.kernels.mlx.kernels")

from mlx_rows import HAS_GPU, check_numbers, decoded, rows_of  # noqa: E402  # needs MLX

QUANTIZED = [row for row in FORMATS if row.is_quantized]


@pytest.mark.parametrize("block", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("shape", [(1, 512), (7, 1536)])
def test_hadamard(backend: str, block: int, shape: tuple[int, int]) -> None:
    """Sums and differences in the reference's order, and its own inverse."""
    x = np.random.default_rng(block).standard_normal(shape).astype(np.float32) * 100
    want = np.empty_like(x)
    reference.hadamard(x, want, block)
    got = arrays.hadamard(arrays.share(x), block)
    check_numbers(np.asarray(got), want, 0.0)
    back = np.asarray(arrays.hadamard(got, block))
    np.testing.assert_allclose(back, x, atol=1e-4)


@pytest.mark.parametrize("name", ["f16", "f32"])
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_dequantize(backend: str, row: Format, name: str) -> None:
    """Every format, with Hadamard runs of 32 and of 64 elements."""
    dtype = mx.float16 if name == "f16" else mx.float32
    for n_elements in (96, 1024 + 64):
        rows = rows_of(row, 3, n_elements)
        got = arrays.dequantize(arrays.share(rows), row.name, dtype)
        check_numbers(np.asarray(got), decoded(row, rows, name), 0.0)


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
def test_dequantize_any_codes(backend: str, row: Format) -> None:
    """All codes, and scales from the smallest denormal to the largest."""
    rng = np.random.default_rng(row.type_id)
    blocks = rng.integers(0, 256, (64, row.block_bytes)).astype(np.uint8)
    header = blocks[:, :4].copy().view(np.uint16)
    header &= 0xBFFF  # no infinity, and room for the largest code
    header[:2] = [[1, 0x8001], [0x3FF, 0]]
    blocks[:, :4] = header.view(np.uint8)
    rows = blocks.reshape(4, -1)
    got = arrays.dequantize(arrays.share(rows), row.name, mx.float32)
    check_numbers(np.asarray(got), decoded(row, rows, "f32"), 0.0)


def test_dequantize_specials(backend: str) -> None:
    """Infinities and NaN of f16 stay what they are."""
    rows = np.array([[np.inf, -np.inf, np.nan, -0.0, 6e-8, 65504]], np.float16).view(np.uint8)
    got = np.asarray(arrays.dequantize(arrays.share(rows), "f16", mx.float32))
    np.testing.assert_array_equal(got, rows.view(np.float16).astype(np.float32))


def test_no_rows(backend: str) -> None:
    """Nothing in, nothing out."""
    empty = mx.zeros((0, 128 * 2), mx.uint8)
    assert arrays.hadamard(mx.zeros((0, 64)), 64).shape == (0, 64)
    assert arrays.dequantize(empty, "f16", mx.float32).shape == (0, 128)


def test_hadamard_adapter(backend: str) -> None:
    """Rows any distance apart."""
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)[:, :64]
    y, transformed = np.empty((5, 64), np.float32), np.empty((5, 64), np.float32)
    reference.hadamard(x, y, 64)
    mlx_kernels.hadamard(x, transformed, 64)
    check_numbers(transformed, y, 0.0)


def test_many_threads(backend: str) -> None:
    """Workers call the kernels at the same time; MLX has a stream for each."""
    if backend == "metal" and not HAS_GPU:
        pytest.skip("the stand-in runs one kernel at a time")
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    want = np.empty_like(x)
    reference.hadamard(x, want, 128)

    def transform(_: int) -> Floats:
        out = np.empty_like(x)
        mlx_kernels.hadamard(x, out, 128)
        return out

    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(transform, range(16)):
            check_numbers(out, want, 0.0)


def test_arrays_refuse_bad_input() -> None:
    """Before anything is computed, naming the argument."""
    rows = mx.zeros((2, 68), mx.uint8)
    for value in (np.zeros((2, 68), np.uint8), mx.zeros((2, 68)), mx.zeros(68, mx.uint8)):
        with pytest.raises(ValueError, match="^src: "):
            arrays.dequantize(value, "q8_0", mx.float32)
    with pytest.raises(ValueError, match="^format: "):
        arrays.dequantize(rows, "q3", mx.float32)
    with pytest.raises(ValueError, match="^dtype: "):
        arrays.dequantize(rows, "q8_0", mx.bfloat16)
    for bad in (0, 16, 48, 128, 1024, "64"):
        with pytest.raises(ValueError, match="^block: "):
            arrays.hadamard(mx.zeros((2, 64)), bad)


def test_share() -> None:
    """Without Metal a copy, of strided memory too; the way back is a view of MLX's memory."""
    memory = np.arange(64, dtype=np.uint8).reshape(8, 8)
    shared = arrays.share(memory[::2, 1:5])
    assert np.array_equal(np.asarray(shared), memory[::2, 1:5])
    whole = arrays.share(memory)
    assert np.shares_memory(np.asarray(whole), np.asarray(whole))
    if not HAS_GPU:
        before = memory.copy()
        memory += 1
        assert np.array_equal(np.asarray(whole), before)


@pytest.mark.metal
@pytest.mark.skipif(not HAS_GPU, reason="needs an Apple GPU")
def test_pages_are_adopted() -> None:
    """Memory that starts on a page is the GPU's without a copy."""
    raw = np.zeros(3 * 16384, np.uint8)
    start = -raw.ctypes.data % 16384
    pages = raw[start : start + 16384].reshape(4, 4096)
    shared = arrays.share(pages)
    pages[2, 5] = 77
    assert int(shared[2, 5].item()) == 77


def test_text_agrees_with_python() -> None:
    """The constants that the Metal text repeats."""
    text = "".join(path.read_text() for path in sorted(metal.FOLDER.glob("*.metal")))
    constants = dict(re.findall(r"constexpr constant int (k\w+) = (\d+);", text))
    assert constants == {"kThreads": str(metal.THREADS), "kTile": str(metal.TILE)}
    (table,) = re.findall(r"kTable\[16\] = \{(.*?)\}", text)
    assert [float(value) for value in table.split(",")] == IQ4_NL.tolist()
    assert np.float32(re.findall(r">= (\S+)f;", text)[0]) == IQ4_NL_LEAST
