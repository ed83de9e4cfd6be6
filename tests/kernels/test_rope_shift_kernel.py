"""rope_shift: what a rotation is, the same bytes on every instruction set, ggml's own routines,
bad input."""

from __future__ import annotations

from typing import Any

import ggml_rows
import numpy as np
import numpy.typing as npt
import pytest
from kernel_rows import at_odd_address, patterns, rows_of, same

from lab import reference
from lab.reference.hadamard import transform
from lab.reference.transcode import decode, encode
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME, CACHE_FORMATS

NAMES = [row.name for row in CACHE_FORMATS]
ELEMENTS = ["f32", "f16", "bf16"]
BLOCKS = [row.name for row in CACHE_FORMATS if row.is_quantized]
STEP = (
    {"f32": 2.0**-23, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 2.0**-8}
    | dict.fromkeys(["q5_0", "q5_1"], 2.0**-5)
    | dict.fromkeys(["q4_0", "q4_1", "iq4_nl"], 2.0**-3)
)
"""Largest error of one rounding into the format, relative to the largest number."""
SHAPES = [
    # head_dim, n_rot, first, heads
    (64, 64, 0, 3),
    (128, 128, 0, 2),
    (96, 96, 0, 1),
    (128, 32, 0, 2),  # partial, a part of the blocks stays
    (96, 32, 0, 4),
    (80, 20, 0, 2),  # heads cross blocks
    (576, 64, 512, 1),  # MLA: the last ones
    (192, 64, 128, 2),
    (32, 6, 3, 2),
    (512, 512, 0, 1),
]


def _table(n_rot: int, n_lines: int = 4, seed: int = 0) -> tuple[Any, Any]:
    angles = np.random.default_rng(seed).normal(size=(n_lines, n_rot // 2)) * 100
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _lines(n: int, n_lines: int = 4, seed: int = 1) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(-1, n_lines, n, np.int32)


def _shifted(rows: Any, *rotation: Any) -> Any:
    """out, at an odd address, after checking it against the reference."""
    got = at_odd_address(np.full(rows.shape, 0xEE, np.uint8), 1)
    expected = np.zeros(rows.shape, np.uint8)
    dispatch.rope_shift(rows, got, *rotation)
    with np.errstate(all="ignore"):
        reference.rope_shift(rows, expected, *rotation)
    assert same(got, expected)
    return got


def _exact(values: Any, cos: Any, sin: Any, heads: tuple[int, int, int, bool]) -> Any:
    """The rotation as multiplication of complex numbers, in float64."""
    head_dim, n_rot, first, neox = heads
    out = values.astype(np.float64)
    part = out.reshape(len(values), -1, head_dim)[:, :, first : first + n_rot]
    half = n_rot // 2
    real, imaginary = (
        (part[..., :half], part[..., half:]) if neox else (part[..., ::2], part[..., 1::2])
    )
    turn = cos.astype(np.float64) + 1j * sin.astype(np.float64)
    turned = (real + 1j * imaginary) * turn[:, None]
    real[:], imaginary[:] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_is_a_rotation(
    kernels: str, name: str, shape: tuple[int, int, int, int], neox: bool
) -> None:
    """Complex multiplication of each pair, rounded once; everything else keeps its bytes."""
    head_dim, n_rot, first, heads = shape
    rows = at_odd_address(rows_of(name, 9, heads * head_dim))
    cos, sin = _table(n_rot)
    lines = _lines(9)
    out = _shifted(rows, name, cos, sin, lines, head_dim, n_rot, first, neox, 0)
    values, got = (decode(BY_NAME[name], x).astype(np.float64) for x in (rows, out))
    moved = lines >= 0
    exact = _exact(values[moved], cos[lines[moved]], sin[lines[moved]], (*shape[:3], neox))
    size = np.abs(values).max(axis=1, keepdims=True)[moved]
    assert (np.abs(got[moved] - exact) <= 3 * size * STEP[name] + 1e-7).all()
    assert same(out[~moved], rows[~moved])
    rest = np.ones(head_dim, bool)
    rest[first : first + n_rot] = False
    still = np.repeat(np.tile(rest, heads), BY_NAME[name].block_bytes)
    assert same(out[:, still], rows[:, still])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] * s[3] % 32 == 0])
@pytest.mark.parametrize("neox", [False, True])
def test_every_format(
    kernels: str, name: str, shape: tuple[int, int, int, int], neox: bool
) -> None:
    """The same bytes as the reference, with every Hadamard block that the head allows."""
    head_dim, n_rot, first, heads = shape
    rows = at_odd_address(rows_of(name, 7, heads * head_dim))
    cos, sin = _table(n_rot)
    for block in (0, 32, 64, 128, 256, 512):
        if block == 0 or head_dim % block == 0:
            rotation = (name, cos, sin, _lines(7), head_dim, n_rot, first, neox, block)
            _shifted(rows, *rotation)
    _shifted(rows, name, cos[:1], sin[:1], None, head_dim, n_rot, first, neox, 0)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("neox", [False, True])
def test_as_ggml_would(kernels: str, name: str, block: int, neox: bool) -> None:
    """ggml's to_float, the rotation in numpy, ggml's from_float: byte for byte.

    Without blocks of zeros, for which ggml's iq4_nl leaves codes that it never set."""
    ggml_type = BY_NAME[name].ggml_type
    random = np.random.default_rng(0)
    scale = random.choice([1e-2, 1.0, 40.0], (40, 1))
    rows = ggml_rows.encode(ggml_type, (random.normal(size=(40, 512)) * scale).astype(np.float32))
    cos, sin = _table(128, 1)
    out = _shifted(rows, name, cos, sin, None, 128, 128, 0, neox, block)
    values = ggml_rows.decode(ggml_type, rows)
    if block:
        values = transform(values, block)
    pairs = values.reshape(40, 4, 128).copy()
    a, b = (pairs[..., :64], pairs[..., 64:]) if neox else (pairs[..., ::2], pairs[..., 1::2])
    turned = a * cos - b * sin, b * cos + a * sin
    a[:], b[:] = turned
    values = pairs.reshape(40, 512)
    if block:
        values = transform(values, block)
    assert same(out, ggml_rows.encode(ggml_type, values))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_without_rotation_keep_their_bytes(kernels: str, name: str) -> None:
    """Partial rotary does not quantize again what it leaves alone."""
    rows = patterns(name, 6, 2 * 128)
    row = BY_NAME[name]
    scales = rows.reshape(6, -1, row.block_bytes)
    scales[:, [0, 4], :4] = np.frombuffer(np.array([0.5, 0.25], np.float16).tobytes(), np.uint8)
    cos, sin = _table(20, 1)
    out = _shifted(rows, name, cos, sin, None, 128, 20, 4, True, 0)
    blocks = out.reshape(scales.shape)
    assert same(blocks[:, 1:4], scales[:, 1:4])
    assert same(blocks[:, 5:], scales[:, 5:])
    assert not same(blocks[:, [0, 4]], scales[:, [0, 4]])


@pytest.mark.parametrize("name", NAMES)
def test_no_angle_and_back(kernels: str, name: str) -> None:
    """Angle 0 keeps every element format's bytes; there and back is near for the others."""
    values = np.random.default_rng(0).normal(size=(12, 256)).astype(np.float32)
    rows = encode(BY_NAME[name], values)
    one, zero = np.ones((1, 32), np.float32), np.zeros((1, 32), np.float32)
    still = _shifted(rows, name, one, zero, None, 64, 64, 0, False, 0)
    if name in ELEMENTS:
        assert same(still, rows)
    cos, sin = _table(64, 1)
    there = _shifted(rows, name, cos, sin, None, 64, 64, 0, False, 0)
    back = _shifted(there, name, cos, -sin, None, 64, 64, 0, False, 0)
    error = np.abs(decode(BY_NAME[name], back) - decode(BY_NAME[name], rows)).max()
    assert error <= 3 * STEP[name] * np.abs(values).max()


@pytest.mark.parametrize("name", ELEMENTS)
def test_any_bits(kernels: str, name: str) -> None:
    """Infinities, NaNs and subnormal numbers of element formats rotate as numbers do."""
    rows = patterns(name, 50, 192, 5)
    cos, sin = _table(64)
    rotation = (name, cos, sin, _lines(50), 64, 64, 0, False, 0)
    got, expected = np.zeros_like(rows), np.zeros_like(rows)
    dispatch.rope_shift(rows, got, *rotation)
    with np.errstate(all="ignore"):
        reference.rope_shift(rows, expected, *rotation)
    a, b = (decode(BY_NAME[name], rows) for rows in (got, expected))
    assert np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("name", ["f16", "q8_0"])
@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_many_rows(kernels: str, name: str, n_threads: int) -> None:
    """Several tasks and threads, rows apart, each row with its own line."""
    n = 2100
    rows = at_odd_address(rows_of(name, n, 1024))
    cos, sin = _table(128, n)
    lines = np.random.default_rng(0).permutation(n).astype(np.int32)
    lines[::7] = -1
    _shifted(rows, name, cos, sin, lines, 128, 128, 0, False, 0, n_threads)


def test_nothing_to_do(kernels: str) -> None:
    """No rows, and rows of which none moves (not even a damaged scale is looked at)."""
    cos, sin = _table(64)
    _shifted(rows_of("f16", 4, 64)[:0], "f16", cos, sin, None, 64, 64, 0, False, 0)
    rows = np.full((3, 68), 0xFF, np.uint8)
    lines = np.full(3, -1, np.int32)
    assert same(_shifted(rows, "q8_0", cos, sin, lines, 64, 64, 0, False, 0), rows)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E01, 0xFD00])
def test_rows_that_are_not_finite(kernels: str, name: str, scale: int) -> None:
    """The first moving row with such a scale is named, and nothing is written."""
    n = 1500
    rows = at_odd_address(rows_of(name, n, 512))
    at = BY_NAME[name].block_bytes * 7
    for i in (n - 20, n - 11, n - 4):
        rows[i, at : at + 2] = (scale & 0xFF, scale >> 8)
    cos, sin = _table(64)
    lines = np.zeros(n, np.int32)
    lines[n - 20] = -1
    out = np.zeros(rows.shape, np.uint8)
    with pytest.raises(ValueError, match=f"^src: row {n - 11} is not finite$"):
        dispatch.rope_shift(rows, out, name, cos, sin, lines, 64, 64, 0, True, 0, 3)
    assert not out.any()
    lines[[n - 11, n - 4]] = -1
    dispatch.rope_shift(rows, out, name, cos, sin, lines, 64, 64, 0, True, 0, 3)


ROWS = rows_of("f16", 4, 128)
COS, SIN = _table(64)
NAN = COS.copy()
NAN[2, 5] = np.nan
INF = SIN.copy()
INF[1, 0] = np.inf
LINES = np.zeros(4, np.int32)
READ_ONLY = ROWS.copy()
READ_ONLY.flags.writeable = False
GOOD: dict[str, Any] = {
    "src": ROWS,
    "out": np.zeros_like(ROWS),
    "format": "f16",
    "cos": COS,
    "sin": SIN,
    "row_table": LINES,
    "head_dim": 64,
    "n_rot": 64,
    "first": 0,
    "neox": True,
    "hadamard_block": 0,
    "n_threads": 1,
}
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "src flat": ("src", {"src": ROWS[0]}),
    "src halves": ("src", {"src": ROWS.view(np.float16)}),
    "src backwards": ("src", {"src": ROWS[::-1]}),
    "src columns": ("src", {"src": np.zeros((4, 512), np.uint8)[:, ::2]}),
    "src no blocks": ("src", {"format": "q8_0"}),
    "src empty": ("src", {"src": ROWS[:, :0], "out": np.zeros((4, 0), np.uint8)}),
    "src none": ("src", {"src": None}),
    "out read-only": ("out", {"out": READ_ONLY}),
    "out short": ("out", {"out": np.zeros((3, 256), np.uint8)}),
    "out wide": ("out", {"out": np.zeros((4, 258), np.uint8)}),
    "out is src": ("out", {"out": ROWS}),
    "format stored": ("format", {"format": "q8", "src": rows_of("q8", 4, 128)}),
    "format unknown": ("format", {"format": "f64"}),
    "format id": ("format", {"format": 1}),
    "cos double": ("cos", {"cos": COS.astype(np.float64)}),
    "cos flat": ("cos", {"cos": COS[0]}),
    "cos narrow": ("cos", {"cos": COS[:, :31].copy()}),
    "cos empty": ("cos", {"cos": COS[:0], "sin": SIN[:0]}),
    "cos strided": ("cos", {"cos": np.zeros((4, 64), np.float32)[:, ::2]}),
    "cos nan": ("cos", {"cos": NAN}),
    "sin infinite": ("sin", {"sin": INF}),
    "sin short": ("sin", {"sin": SIN[:3]}),
    "sin none": ("sin", {"sin": None}),
    "row_table int64": ("row_table", {"row_table": LINES.astype(np.int64)}),
    "row_table short": ("row_table", {"row_table": LINES[:3]}),
    "row_table strided": ("row_table", {"row_table": np.zeros(8, np.int32)[::2]}),
    "row_table beyond": ("row_table", {"row_table": LINES + 4}),
    "row_table below": ("row_table", {"row_table": LINES - 2}),
    "head_dim divides": ("head_dim", {"head_dim": 96}),
    "head_dim large": ("head_dim", {"head_dim": 256}),
    "head_dim zero": ("head_dim", {"head_dim": 0}),
    "n_rot odd": ("n_rot", {"n_rot": 63}),
    "n_rot zero": ("n_rot", {"n_rot": 0}),
    "n_rot large": ("n_rot", {"n_rot": 66}),
    "first negative": ("first", {"first": -1}),
    "first large": ("first", {"first": 1}),
    "neox number": ("neox", {"neox": 1}),
    "hadamard_block small": ("hadamard_block", {"hadamard_block": 16}),
    "hadamard_block odd": ("hadamard_block", {"hadamard_block": 96}),
    "hadamard_block large": ("hadamard_block", {"hadamard_block": 128}),
    "hadamard_block negative": ("hadamard_block", {"hadamard_block": -64}),
    "threads text": ("n_threads", {"n_threads": "2"}),
    "no threads": ("n_threads", {"n_threads": 0}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(kernels: str, name: str) -> None:
    """Every bad argument is named and nothing is written."""
    argument, changed = BAD[name]
    arguments = GOOD | changed
    before = arguments["out"].tobytes()
    with pytest.raises(ValueError, match=f"^{argument}: "):
        dispatch.rope_shift(**arguments)
    assert arguments["out"].tobytes() == before
    dispatch.rope_shift(**(GOOD | {"out": np.zeros_like(ROWS)}))
