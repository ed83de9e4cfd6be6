"""Checks of the arguments of kernels that are not C++; every failure is a ValueError that names the
argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.kernels.arrays import Bytes, Floats, Lines
from towerd.kernels.formats import BY_NAME, Format

THREADS_MAX = 1024


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


def check_threads(n_threads: object) -> None:
    """An upper bound of threads, 1 to 1024."""
    check_int(n_threads, "n_threads", 1, THREADS_MAX)


def check_int(value: object, name: str, low: int, high: int) -> int:
    """`value`, an int in [low, high]."""
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}")
    return value


def check_flag(value: object, name: str) -> bool:
    """`value`, a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False")
    return value


def check_format(value: object, name: str) -> Format:
    """The format of that name."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected the name of a format")
    if value not in BY_NAME:
        raise ValueError(f"{name}: unknown format {value}")
    return BY_NAME[value]


def check_block(value: object, name: str) -> int:
    """`value`, a power of two from 32 to 512."""
    block = check_int(value, name, 32, 512)
    if block & (block - 1):
        raise ValueError(f"{name}: not a power of two")
    return block


def elements_of(row: Format, row_bytes: int, name: str) -> int:
    """Elements of a row of `row_bytes` bytes, a whole number of blocks and at least one."""
    if row_bytes == 0 or row_bytes % row.block_bytes:
        raise ValueError(f"{name}: rows of {row_bytes} bytes are not whole blocks of {row.name}")
    return row.n_elements(row_bytes)


def array_of(value: Any, name: str, dtype: npt.DTypeLike, ndim: int) -> npt.NDArray[Any]:
    """Any buffer of `ndim` dimensions of that type as an array without a copy."""
    try:
        array = np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError) as error:
        raise ValueError(f"{name}: not a buffer") from error
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(
            f"{name}: expected {ndim} dimension(s) of {np.dtype(dtype)}, "
            f"found {array.dtype} of {array.ndim} dimension(s)"
        )
    return array


def check_contiguous(array: npt.NDArray[Any], name: str) -> None:
    """Elements one after the other, each aligned to its size."""
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: not contiguous")
    if not array.flags.aligned:
        raise ValueError(f"{name}: not aligned")


def rows_of(
    value: Any, name: str, dtype: npt.DTypeLike = np.uint8, *, writable: bool = False
) -> npt.NDArray[Any]:
    """Two dimensions; each row is contiguous, and rows lie in ascending order at any distance."""
    array = array_of(value, name, dtype, 2)
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: not a writable buffer")
    if array.shape[1] > 1 and array.strides[1] != array.itemsize:
        raise ValueError(f"{name}: the elements of a row are not contiguous")
    if array.shape[0] > 1 and array.strides[0] < array.shape[1] * array.itemsize:
        raise ValueError(f"{name}: rows overlap or run backwards")
    return array


def check_out(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """`out` has the shape of `src` and lies elsewhere."""
    if target.shape != source.shape:
        raise ValueError(f"out: expected shape {source.shape}")
    check_apart(source, target, "out: overlaps src")


def check_apart(source: npt.NDArray[Any], target: npt.NDArray[Any], message: str) -> None:
    """The two share no memory."""
    if source.size and target.size and np.may_share_memory(source, target):
        raise ValueError(message)


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
    check_threads(n_threads)
    source = rows_of(src, "src")
    target = rows_of(out, "out", writable=True)
    row = check_format(format, "format")
    if not row.is_cache_type:
        raise ValueError(f"format: {row.name} is not a cache type")
    n_elements = elements_of(row, source.shape[1], "src")
    check_out(source, target)
    check_heads(n_elements, head_dim, n_rot, first, hadamard_block)
    check_flag(neox, "neox")
    cosines, sines = _checked_table(cos, n_rot, "cos"), _checked_table(sin, n_rot, "sin")
    if len(cosines) != len(sines):
        raise ValueError("sin: expected as many lines as cos")
    lines = checked_lines(row_table, len(source), len(cosines))
    return RopeShift(
        source, target, row, cosines, sines, lines, head_dim, n_rot, first, neox, hadamard_block
    )


def check_heads(
    n_elements: int, head_dim: int, n_rot: int, first: int, hadamard_block: int
) -> None:
    """Which elements of a row rotate."""
    check_int(head_dim, "head_dim", 2, n_elements)
    if n_elements % head_dim:
        raise ValueError(
            f"head_dim: a row of {n_elements} elements is not whole heads of {head_dim}"
        )
    check_int(n_rot, "n_rot", 2, head_dim)
    if n_rot % 2:
        raise ValueError("n_rot: expected an even number")
    check_int(first, "first", 0, head_dim - n_rot)
    if check_int(hadamard_block, "hadamard_block", 0, 512):
        check_block(hadamard_block, "hadamard_block")
        if head_dim % hadamard_block:
            raise ValueError(f"hadamard_block: {hadamard_block} does not divide head_dim")


def _checked_table(table: Floats, n_rot: int, name: str) -> Floats:
    array: Floats = array_of(table, name, np.float32, 2)
    check_contiguous(array, name)
    if len(array) == 0 or array.shape[1] != n_rot // 2:
        raise ValueError(f"{name}: expected shape (k, {n_rot // 2}), k at least 1")
    bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(bad):
        raise ValueError(f"{name}: line {bad[0]} is not finite")
    return array


def checked_lines(row_table: Lines | None, n_rows: int, n_lines: int) -> Lines:
    """The line of each row; zeros for None."""
    if row_table is None:
        return np.zeros(n_rows, np.int32)
    array: Lines = array_of(row_table, "row_table", np.int32, 1)
    check_contiguous(array, "row_table")
    if len(array) != n_rows:
        raise ValueError(f"row_table: expected {n_rows} entries")
    if n_rows and (array.min() < -1 or array.max() >= n_lines):
        raise ValueError(f"row_table: a line is not in [-1, {n_lines})")
    return array
