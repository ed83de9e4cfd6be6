"""Rows for the MLX kernels, and comparing what they give with the numpy reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from lab import reference
from lab.reference.blocks import CODES
from towerd.kernels.arrays import Bytes, Floats
from towerd.kernels.formats import Format

HAS_GPU = mx.metal.is_available()
ULPS = {"f32": 2.0**-22, "f16": 2.0**-10, "bf16": 2.0**-7}
"""Relative error that an Apple GPU may add in an element format; blocks: one step of the scale."""


@dataclass(frozen=True)
class Heads:
    """What rotates in a row of K."""

    n: int
    head_dim: int
    n_rot: int
    first: int
    neox: bool
    hadamard_block: int
    """For quantized caches."""


GEOMETRIES = {
    "llama": Heads(8, 128, 128, 0, False, 128),
    "neox partial": Heads(3, 64, 32, 0, True, 64),
    "mla tail": Heads(1, 576, 64, 512, False, 64),
    "blocks across heads": Heads(2, 80, 30, 2, True, 0),
    "wide": Heads(5, 512, 512, 0, True, 512),
    "middle block": Heads(2, 96, 32, 32, False, 32),
}


def rows_of(row: Format, n: int, n_elements: int, seed: int = 0) -> Bytes:
    """Rows of all magnitudes. Blocks of all but the first and last row get any codes, which no
    encoder would have chosen."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, n_elements)).astype(np.float32)
    values *= np.exp2(rng.integers(-12, 8, (n, 1))).astype(np.float32)
    values[0, :64] = 0
    values[-1, 32:64] = -3
    rows = reference.transcoded(values.view(np.uint8), "f32", row.name)
    if row.is_quantized:
        header = CODES[row.codec].header_bytes
        blocks = rows.reshape(n, -1, row.block_bytes)[1:-1]
        blocks[:, :, header:] = rng.integers(0, 256, blocks[:, :, header:].shape)
    return rows


def ones(row: Format, n: int, n_elements: int) -> Bytes:
    """Rows of a quantized cache type that decode to 1 throughout."""
    code = {"q8_0": 1, "q4_0": 9, "q5_0": 17, "q4_1": 1, "q5_1": 1, "iq4_nl": 8}[row.name]
    nibbles = [code & 15 | (code & 15) << 4] * 16
    body = {8: [code] * 32, 5: [255 * (code >> 4)] * 4 + nibbles, 4: nibbles}
    kind = CODES[row.name]
    header = np.array([1, 0], np.float16).view(np.uint8)[: kind.header_bytes]
    block = np.concatenate([header, np.array(body[kind.bits], np.uint8)])
    return np.tile(block, (n, n_elements // 32))


def decoded(row: Format, rows: Bytes, name: str) -> npt.NDArray[Any]:
    """Rows as f16 or f32 by the reference."""
    return reference.transcoded(rows, row.name, name).view(
        np.float16 if name == "f16" else np.float32
    )


def check_numbers(got: npt.NDArray[Any], want: npt.NDArray[Any], tolerance: float) -> None:
    """Equal to the bit on CPUs; on a GPU up to `tolerance`, relative to each row."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if not HAS_GPU:
        assert np.array_equal(got.view(np.uint8), want.view(np.uint8))
        return
    peak = np.abs(want.astype(np.float64)).max(axis=1, keepdims=True)
    assert (np.abs(got.astype(np.float64) - want) <= tolerance * peak).all()


def check_rows(row: Format, got: Bytes, want: Bytes) -> None:
    """As `check_numbers`, for rows of a cache type."""
    tolerance = 2.0 ** (1 - row.block_bytes // 4) if row.is_quantized else ULPS[row.name]
    if HAS_GPU:
        check_numbers(decoded(row, got, "f32"), decoded(row, want, "f32"), tolerance)
    else:
        assert np.array_equal(got, want)


def table_of(n_rot: int, n_lines: int) -> tuple[Floats, Floats]:
    angle = np.random.default_rng(n_rot).uniform(-1e3, 1e3, (n_lines, n_rot // 2))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
