"""transcode and transcoded: every pair of formats, the same bytes on every instruction set, bad
input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_rows import at_odd_address, numbers, patterns, rows_of, same

from lab import reference
from lab.reference.hadamard import transform
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME, FORMATS

NAMES = [row.name for row in FORMATS]
ELEMENTS = ["f32", "f16", "bf16"]
BLOCKS = [row.name for row in FORMATS if row.is_quantized]


def _size(name: str, n: int, n_elements: int) -> int:
    return n * BY_NAME[name].row_bytes(n_elements)


def _both(size: int, jobs: list[Any], n_threads: int = 2) -> Any:
    """dst as the kernels in force write it, after checking it against the reference."""
    got, expected = np.full(size, 0xEE, np.uint8), np.full(size, 0xEE, np.uint8)
    dispatch.transcode(got, jobs, n_threads)
    with np.errstate(all="ignore"):
        reference.transcode(expected, jobs)
    assert same(got, expected)
    return got


def _one(rows: Any, src: str, dst: str, n_threads: int = 2) -> Any:
    """`transcoded` by the kernels in force, after checking it against the reference."""
    got = dispatch.transcoded(rows, src, dst, n_threads)
    with np.errstate(all="ignore"):
        expected = reference.transcoded(rows, src, dst)
    assert same(got, expected)
    return got


def _holds_all(src: str, dst: str) -> bool:
    """Whether there are no rows of `src` that `dst` cannot hold."""
    return src == dst or dst in ELEMENTS


@pytest.mark.parametrize("src", NAMES)
@pytest.mark.parametrize("n_elements", [32, 96, 1024, 1120, 2112])
def test_every_pair(kernels: str, src: str, n_elements: int) -> None:
    """From rows at odd addresses, rows longer than one run; into a buffer also to odd addresses,
    several jobs."""
    n = 5 if n_elements < 2000 else 3
    rows = at_odd_address(rows_of(src, n, n_elements))
    index = np.array([n - 1, 0, 0, 2], np.int64)
    jobs: list[Any] = []
    at = 1
    for dst in NAMES:
        whole = _one(rows, src, dst)
        assert whole.shape == (n, BY_NAME[dst].row_bytes(n_elements))
        if _holds_all(src, dst):
            jobs.append((at, rows, None if len(jobs) % 2 else index, src, dst))
            at += _size(dst, n if len(jobs) % 2 == 0 else 4, n_elements) + len(jobs) % 3
    _both(at + 1, jobs)


@pytest.mark.parametrize("name", BLOCKS)
def test_any_bits_of_blocks(kernels: str, name: str) -> None:
    """Codes and scales of any value decode alike, infinite and NaN scales included."""
    rows = patterns(name, 16, 128)
    got = dispatch.transcoded(rows, name, "f32")
    with np.errstate(all="ignore"):
        expected = reference.transcoded(rows, name, "f32")
    assert np.array_equal(got.view(np.float32), expected.view(np.float32), equal_nan=True)


def test_every_half(kernels: str) -> None:
    """All 65,536 halves become f32 exactly, and come back as they were."""
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024)
    wide = _one(halves.view(np.uint8), "f16", "f32")
    with np.errstate(invalid="ignore"):
        exact = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(wide.view(np.float32), exact, equal_nan=True)
    back = _one(wide, "f32", "f16").view(np.uint16)
    quiet = np.where((halves & 0x7FFF) > 0x7C00, halves | 0x200, halves)
    assert np.array_equal(back, quiet)
    _one(halves.view(np.uint8), "f16", "bf16")
    _one(halves.view(np.uint8), "bf16", "f32")
    _one(halves.view(np.uint8), "bf16", "f16")


def _edges() -> Any:
    """f32 on, just below and just above every number of f16 and bf16 and half-way between."""
    with np.errstate(all="ignore"):
        halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
        halves[-1] = 65536
        middle = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    tops = np.arange(0x7F81, dtype=np.uint32) << 16
    raw = np.concatenate([middle.view(np.uint32), halves.astype(np.float32).view(np.uint32), tops])
    raw = np.concatenate([raw, raw + np.uint32(0x8000), raw + 1, raw - 1, raw | 0x80000000])
    return np.resize(raw, (raw.size // 1024 + 1, 1024)).astype(np.uint32)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_rounding(kernels: str, name: str) -> None:
    """To nearest, ties to even: around every number, for all magnitudes, NaNs and infinities."""
    raw = _edges()
    out = _one(raw.view(np.uint8), "f32", name).view(np.uint16)
    values = raw.view(np.float32)
    finite = np.isfinite(values)
    assert ((out[np.isnan(values)] & 0x7FFF) > (0x7C00 if name == "f16" else 0x7F80)).all()
    with np.errstate(all="ignore"):
        if name == "f16":
            assert np.array_equal(out[finite], values.astype(np.float16).view(np.uint16)[finite])
        else:
            wide = (out.astype(np.uint32) << 16).view(np.float32)
            step = np.spacing(np.abs(values).astype(np.float64)) * 2.0**45  # of bf16
            near = np.abs(wide.astype(np.float64) - values)[finite & np.isfinite(wide)]
            assert (near <= np.maximum(step, 2.0**-134)[finite & np.isfinite(wide)]).all()


@pytest.mark.parametrize("n_elements", [1, 2, 3, 5, 15, 16, 17, 31, 33, 1023, 1025])
def test_tails(kernels: str, n_elements: int) -> None:
    """Rows of elements need not be whole vectors; nothing is written beside them."""
    for src in ELEMENTS:
        rows = at_odd_address(patterns(src, 3, n_elements), 1)
        at, jobs = 1, []
        for dst in ELEMENTS:
            jobs.append((at, rows, None, src, dst))
            at += _size(dst, 3, n_elements) + 1
        _both(at, jobs)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_many_rows(kernels: str, n_threads: int) -> None:
    """Several tasks and threads, gathered and strided."""
    n = 1500
    rows = at_odd_address(rows_of("q4h", n, 1024))
    index = np.random.default_rng(3).permutation(n).astype(np.int64)
    f16 = _size("f16", n, 1024)
    jobs = [(f16, rows, index, "q4h", "f16"), (0, rows, None, "q4h", "f16")]
    dst = _both(2 * f16, jobs, n_threads).reshape(2, n, -1)
    assert np.array_equal(dst[1], dst[0][index])


def test_hadamard_is_part_of_the_format(kernels: str) -> None:
    """q4h is q4 of the rotated row; 96 elements rotate by 32, 128 by 64; h to h never rotates."""
    for n_elements, block in ((96, 32), (128, 64)):
        values = numbers(6, n_elements)
        rotated = transform(values, block)
        stored = _one(values.view(np.uint8), "f32", "q4h")
        assert same(stored, _one(rotated.view(np.uint8), "f32", "q4"))
        plain = _one(stored, "q4", "q6")
        assert same(_one(stored, "q4h", "q6h"), plain)


def test_same_format_copies(kernels: str) -> None:
    """Bytes, whatever they mean: not even a NaN is looked at."""
    for name in NAMES:
        rows = patterns(name, 4, 64)
        assert same(_one(rows, name, name), rows)


def test_nothing_to_do(kernels: str) -> None:
    """No jobs, no rows, an empty index; any buffer will do."""
    rows = rows_of("f16", 3, 64)
    dispatch.transcode(bytearray(), [])
    _both(2, [(2, rows[:0], None, "f16", "bf16"), (1, rows, np.empty(0, np.int64), "f16", "f32")])
    assert _one(rows[:0], "f16", "q8").shape == (0, 68)


ROWS = rows_of("f16", 4, 64)
DST = np.zeros(1024, np.uint8)
READ_ONLY = np.zeros(1024, np.uint8)
READ_ONLY.flags.writeable = False
BAD: dict[str, tuple[str, Any, Any, Any]] = {
    "dst float": ("dst", np.zeros(32, np.float32), [], 1),
    "dst read-only": ("dst", READ_ONLY, [], 1),
    "dst strided": ("dst", DST[::2], [], 1),
    "jobs none": ("jobs", DST, None, 1),
    "job of three": (r"jobs\[0\]", DST, [(0, ROWS, None)], 1),
    "job list": (r"jobs\[0\]", DST, [[0, ROWS, None, "f16", "q8"]], 1),
    "offset negative": (r"jobs\[0\].offset", DST, [(-1, ROWS, None, "f16", "bf16")], 1),
    "offset beyond": (r"jobs\[0\].offset", DST, [(1025, ROWS, None, "f16", "bf16")], 1),
    "rows flat": (r"jobs\[0\].rows", DST, [(0, ROWS[0], None, "f16", "bf16")], 1),
    "rows halves": (r"jobs\[0\].rows", DST, [(0, ROWS.view(np.uint16), None, "f16", "bf16")], 1),
    "rows backwards": (r"jobs\[0\].rows", DST, [(0, ROWS[::-1], None, "f16", "bf16")], 1),
    "rows cut": (r"jobs\[0\].rows", DST, [(0, ROWS[:, :33], None, "f16", "bf16")], 1),
    "rows no blocks": (r"jobs\[0\].rows", DST, [(0, ROWS, None, "q8_0", "f16")], 1),
    "rows empty": (r"jobs\[0\].rows", DST, [(0, ROWS[:, :0], None, "f16", "f32")], 1),
    "elements no blocks": (
        r"jobs\[0\].dst_format",
        DST,
        [(0, ROWS[:, :80], None, "bf16", "q8")],
        1,
    ),
    "src_format": (r"jobs\[0\].src_format", DST, [(0, ROWS, None, "F16", "q8")], 1),
    "src_format id": (r"jobs\[0\].src_format", DST, [(0, ROWS, None, 1, "q8")], 1),
    "dst_format": (
        r"jobs\[1\].dst_format",
        DST,
        [(0, ROWS, None, "f16", "bf16")] * 1 + [(512, ROWS, None, "f16", "q4_h")],
        1,
    ),
    "dst_format none": (r"jobs\[0\].dst_format", DST, [(0, ROWS, None, "f16", None)], 1),
    "dst_format quantized": (
        r"jobs\[0\].dst_format: q8 is quantized",
        DST,
        [(0, ROWS, None, "f16", "q8")],
        1,
    ),
    "quantized again": (
        r"jobs\[0\].dst_format: q4h is quantized",
        DST,
        [(0, ROWS[:, :68], None, "q8h", "q4h")],
        1,
    ),
    "dst_format nul": (r"jobs\[0\].dst_format", DST, [(0, ROWS, None, "f16", "q8\0h")], 1),
    "too many rows": (r"jobs\[0\]", DST, [(1, ROWS, None, "f16", "f32")], 1),
    "index beyond": (r"jobs\[0\].index", DST, [(0, ROWS, np.array([4]), "f16", "bf16")], 1),
    "index int32": (r"jobs\[0\].index", DST, [(0, ROWS, np.zeros(1, np.int32), "f16", "bf16")], 1),
    "jobs overlap": (
        "jobs",
        DST,
        [(0, ROWS, None, "f16", "bf16"), (511, ROWS, None, "f16", "bf16")],
        1,
    ),
    "source in dst": ("jobs", DST, [(0, DST[512:].reshape(4, 128), None, "f16", "bf16")], 1),
    "no threads": ("n_threads", DST, [], 0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(kernels: str, name: str) -> None:
    """Every bad argument is named, and a good job beside a bad one has not run."""
    argument, dst, jobs, n_threads = BAD[name]
    before = bytes(DST)
    with pytest.raises(ValueError, match=f"^{argument}[.: ]"):
        dispatch.transcode(dst, jobs, n_threads)
    assert bytes(DST) == before


BAD_ROWS: dict[str, tuple[str, Any]] = {
    "rows flat": ("rows", (ROWS[0], "f16", "q8")),
    "rows halves": ("rows", (ROWS.view(np.uint16), "f16", "q8")),
    "rows backwards": ("rows", (ROWS[::-1], "f16", "q8")),
    "rows apart": ("rows", (ROWS[:, ::2], "f16", "q8")),
    "rows none": ("rows", (None, "f16", "q8")),
    "rows cut": ("rows", (ROWS[:, :33], "f16", "q8")),
    "rows no blocks": ("rows", (ROWS, "q8_0", "f16")),
    "rows empty": ("rows", (ROWS[:, :0], "f16", "f32")),
    "elements no blocks": ("dst_format", (ROWS[:, :80], "f16", "q8")),
    "src_format": ("src_format", (ROWS, "F16", "q8")),
    "src_format id": ("src_format", (ROWS, 1, "q8")),
    "dst_format": ("dst_format", (ROWS, "f16", "q4_h")),
    "dst_format none": ("dst_format", (ROWS, "f16", None)),
    "no threads": ("n_threads", (ROWS, "f16", "q8", 0)),
    "threads text": ("n_threads", (ROWS, "f16", "q8", "2")),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_input_of_transcoded(kernels: str, name: str) -> None:
    """Every bad argument is named."""
    argument, arguments = BAD_ROWS[name]
    with pytest.raises(ValueError, match=f"^{argument}: "):
        dispatch.transcoded(*arguments)


def _spots(n: int, n_elements: int) -> list[tuple[int, int]]:
    """(row, element): the ends of rows, runs of 1,024, blocks and vectors, and in between."""
    last = n_elements - 1
    columns = [0, 15, 31, 32, 500, 1023, 1024, 1055, last - 32, last - 31, last]
    return [(row, column) for row in (0, n // 2, n - 1) for column in columns]


@pytest.mark.parametrize("dst", [*BLOCKS])
def test_a_bad_number_is_found_anywhere(kernels: str, dst: str) -> None:
    """Wherever it stands and however the rows lie, it is found and the rows are as they were."""
    n, n_elements = 3, 1120
    for src in ("f32", "f16"):
        rows = at_odd_address(rows_of(src, n, n_elements))
        size = rows.shape[1] // n_elements
        bad = np.array([np.nan], np.float32 if src == "f32" else np.float16).view(np.uint8)
        for row, column in _spots(n, n_elements):
            spot = rows[row, column * size : (column + 1) * size]
            held = spot.copy()
            spot[:] = bad
            before = rows.tobytes()
            with pytest.raises(ValueError, match=rf"^rows: row {row} is not finite$"):
                dispatch.transcoded(rows, src, dst)
            assert rows.tobytes() == before
            spot[:] = held
        _one(rows, src, dst)


@pytest.mark.parametrize("src", ELEMENTS)
@pytest.mark.parametrize("dst", ["q8_0", "q4h"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(kernels: str, src: str, dst: str, value: float) -> None:
    """The first such row is named, also far into the rows and by several threads."""
    n, n_elements = 700, 1088
    values = numbers(n, n_elements)
    values[[n - 9, n - 3], n_elements - 1] = value
    rows = at_odd_address(dispatch.transcoded(values.view(np.uint8), "f32", src))
    for n_threads in (1, 3):
        with pytest.raises(ValueError, match=rf"^rows: row {n - 9} is not finite$"):
            dispatch.transcoded(rows, src, dst, n_threads)
    with pytest.raises(ValueError, match=r"^rows: row 2 is not finite$"):
        dispatch.transcoded(rows[n - 5 :], src, dst)
    _one(rows[: n - 9][-20:], src, dst)


def test_scales_that_are_not_finite(kernels: str) -> None:
    """Re-quantizing a damaged row is refused as well; decoding it is not."""
    rows = rows_of("q5_1", 6, 64)
    rows[4, 26:28] = (0x00, 0x7C)  # minimum of the second block: infinity
    for dst in ("q8_0", "q8h"):
        with pytest.raises(ValueError, match=r"^rows: row 4 is not finite$"):
            dispatch.transcoded(rows, "q5_1", dst)
    assert np.isinf(dispatch.transcoded(rows, "q5_1", "f32").view(np.float32)[4, 32:]).all()


def test_numbers_beyond_a_scale(kernels: str) -> None:
    """What f16 scales cannot hold is refused, before a rotation 1/sqrt(block) of it."""
    values = numbers(4, 64)
    for dst, limit in (("q8_0", 65504), ("q4a", 65504), ("q8h", 8188)):
        values[2, 7] = -limit
        _one(values.view(np.uint8), "f32", dst)
        values[2, 7] = np.nextafter(np.float32(limit), np.float32(1e9))
        with pytest.raises(ValueError, match=rf"^rows: row 2 has a number beyond \+-{limit}$"):
            dispatch.transcoded(values.view(np.uint8), "f32", dst)


def test_not_finite_beats_beyond(kernels: str) -> None:
    """A row with both is one that is not finite, wherever the two stand."""
    values = numbers(2, 2112)
    values[1, 3], values[1, 2000] = 1e6, np.nan
    with pytest.raises(ValueError, match=r"^rows: row 1 is not finite$"):
        dispatch.transcoded(values.view(np.uint8), "f32", "q8")


def test_new_memory_is_the_callers(kernels: str) -> None:
    """The result may be written to and shares nothing with the rows, also where bytes are copied."""
    rows = rows_of("q8", 3, 64)
    for dst in ("q8", "q4", "f16"):
        out = dispatch.transcoded(rows, "q8", dst)
        assert out.flags.writeable
        assert out.flags.c_contiguous
        assert out.dtype == np.uint8
        assert not np.may_share_memory(out, rows)
