"""Rotation of K rows by a position delta, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from towerd.kernels.formats import Format
from towerd.kernels.reference import checks as checks
from towerd.kernels.reference.checks import Bytes, Floats, Index, Lines
from towerd.kernels.reference.hadamard import transform
from towerd.kernels.reference.transcode import decode, encode


@dataclass(frozen=True, slots=True)
class RopeShift:
    """The checked arguments of one `rope_shift`."""

    src: Bytes
    out: Bytes
    format: Format
    cos: Floats
    sin: Floats
    row_table: Lines
    """int32[n], zeros where the caller gave None."""
    head_dim: int
    n_rot: int
    first: int
    neox: bool
    hadamard_block: int

    @property
    def n_elements(self) -> int:
        """Elements of a row."""
        return self.format.n_elements(self.src.shape[1])

    def bytes_of(self, begin: int, end: int) -> slice:
        """Where in a row the elements [begin, end), whole blocks, lie."""
        size, block = self.format.block_bytes, self.format.block_elements
        return slice(begin // block * size, end // block * size)

    def touched(self) -> list[tuple[int, int]]:
        """Element runs [begin, end) of whole blocks, of the format and of the Hadamard rotation,
        that hold rotated elements. Everything else is copied as bytes."""
        unit = max(self.format.block_elements, self.hadamard_block)
        runs: list[tuple[int, int]] = []
        for head in range(0, self.n_elements, self.head_dim):
            begin = (head + self.first) // unit * unit
            end = -(-(head + self.first + self.n_rot) // unit) * unit
            if runs and begin <= runs[-1][1]:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((begin, end))
        return runs


def rope_shift(
    src: Bytes,
    out: Bytes,
    format: str,
    cos: Floats,
    sin: Floats,
    row_table: Lines | None,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
    n_threads: int = 1,
) -> None:
    """Rotate the RoPE pairs (a, b) of K rows: (a cos - b sin, b cos + a sin).

    src, out: uint8[n, row_bytes], rows any distance apart, not in the same memory
    format: a cache type
    cos, sin: float32[k, n_rot / 2], contiguous: a line for each position delta that occurs
    row_table: int32[n], the line of each row; -1: the row does not move. None: all line 0
    head_dim, n_rot, first: in each head of head_dim elements, the n_rot from `first` on rotate
    neox: pair j is (j, j + n_rot / 2); otherwise (2j, 2j + 1)
    hadamard_block: rows hold keys rotated by Hadamard runs of this many elements (a power of two,
        32 to 512, that divides head_dim), which is undone before and redone after; 0: none

    Computed in f32, stored as the CPU backend of ggml stores it. Rows that do not move and
    blocks without a rotated element are copied as bytes, so partial rotary does not requantize
    elements that it does not rotate. Source: llama.cpp's build_rope_shift (llama-kv-cache.cpp) and
    Theorem 9 of the towers paper, without the cases that llama.cpp gets wrong.

    ValueError for mismatched shapes, a stored format, a table that is not finite, and a quantized
    row with a scale that is not finite; nothing has been written then."""
    shift = checked_rope_shift(
        src,
        out,
        format,
        cos,
        sin,
        row_table,
        head_dim,
        n_rot,
        first,
        neox,
        hadamard_block,
        n_threads,
    )
    moves = np.flatnonzero(shift.row_table >= 0)
    values = _load(shift, moves)
    _rotate(shift, values, shift.row_table[moves])
    shift.out[:] = shift.src
    for begin, end in shift.touched():
        run = values[:, begin:end]
        if shift.hadamard_block:
            run = transform(run, shift.hadamard_block)
        shift.out[moves, shift.bytes_of(begin, end)] = encode(shift.format, run)


def checked_rope_shift(
    src: Bytes,
    out: Bytes,
    format: str,
    cos: Floats,
    sin: Floats,
    row_table: Lines | None,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
    n_threads: int,
) -> RopeShift:
    """The arguments as arrays; ValueError if `rope_shift` must not be called with these.

    It does not check that the rows of a quantized format are finite."""
    checks.check_threads(n_threads)
    source = checks.rows_of(src, "src")
    target = checks.rows_of(out, "out", writable=True)
    row = checks.check_format(format, "format")
    if not row.is_cache_type:
        raise ValueError(f"format: {row.name} is not a cache type")
    n_elements = checks.elements_of(row, source.shape[1], "src")
    checks.check_out(source, target)
    checks.check_int(head_dim, "head_dim", 2, n_elements)
    if n_elements % head_dim:
        raise ValueError(
            f"head_dim: a row of {n_elements} elements is not whole heads of {head_dim}"
        )
    checks.check_int(n_rot, "n_rot", 2, head_dim)
    if n_rot % 2:
        raise ValueError("n_rot: expected an even number")
    checks.check_int(first, "first", 0, head_dim - n_rot)
    checks.check_flag(neox, "neox")
    if checks.check_int(hadamard_block, "hadamard_block", 0, 512):
        checks.check_block(hadamard_block, "hadamard_block")
        if head_dim % hadamard_block:
            raise ValueError(f"hadamard_block: {hadamard_block} does not divide head_dim")
    cosines, sines = _checked_table(cos, n_rot, "cos"), _checked_table(sin, n_rot, "sin")
    if len(cosines) != len(sines):
        raise ValueError("sin: expected as many lines as cos")
    lines = _checked_lines(row_table, len(source), len(cosines))
    return RopeShift(
        source, target, row, cosines, sines, lines, head_dim, n_rot, first, neox, hadamard_block
    )


def _checked_table(table: Floats, n_rot: int, name: str) -> Floats:
    array: Floats = checks.array_of(table, name, np.float32, 2)
    checks.check_contiguous(array, name)
    if len(array) == 0 or array.shape[1] != n_rot // 2:
        raise ValueError(f"{name}: expected shape (k, {n_rot // 2}), k at least 1")
    bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(bad):
        raise ValueError(f"{name}: line {bad[0]} is not finite")
    return array


def _checked_lines(row_table: Lines | None, n_rows: int, n_lines: int) -> Lines:
    if row_table is None:
        return np.zeros(n_rows, np.int32)
    array: Lines = checks.array_of(row_table, "row_table", np.int32, 1)
    checks.check_contiguous(array, "row_table")
    if len(array) != n_rows:
        raise ValueError(f"row_table: expected {n_rows} entries")
    if n_rows and (array.min() < -1 or array.max() >= n_lines):
        raise ValueError(f"row_table: a line is not in [-1, {n_lines})")
    return array


def _load(shift: RopeShift, moves: Index) -> Floats:
    """float32[moves, n_elements], zeros where no rotated element is near."""
    values = np.zeros((len(moves), shift.n_elements), np.float32)
    for begin, end in shift.touched():
        values[:, begin:end] = decode(shift.format, shift.src[moves, shift.bytes_of(begin, end)])
    if shift.format.is_quantized:
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            raise ValueError(f"src: row {moves[bad[0]]} is not finite")
    if shift.hadamard_block:
        values = transform(values, shift.hadamard_block)
    return values


def _rotate(shift: RopeShift, values: Floats, lines: Lines) -> None:
    cos, sin = shift.cos[lines][:, None], shift.sin[lines][:, None]
    heads = values.reshape(len(values), shift.n_elements // shift.head_dim, shift.head_dim)
    pairs = heads[:, :, shift.first : shift.first + shift.n_rot]
    half = shift.n_rot // 2
    if shift.neox:
        first, second = pairs[:, :, :half], pairs[:, :, half:]
    else:
        first, second = pairs[:, :, ::2], pairs[:, :, 1::2]
    a, b = first.copy(), second.copy()
    with np.errstate(all="ignore"):
        first[:] = a * cos - b * sin
        second[:] = b * cos + a * sin
