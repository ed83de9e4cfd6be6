"""Interleaved range ANS over a page of integers, in Python: the bytes of `kernels/cpp/rans.cpp`.

A page, little-endian, of values[component, row]:

    u32  number of words
    u32  number of escaped values
    u64  states[4], what a decoder starts with, each in [2^31, 2^63)
    u32  words
    i16  escaped values, in the order in which they are read

Values are read component by component, row by row; row r is in state r % 4. A class of components has
a shift and a table of 64 frequencies, which add up to 2^14. A value v is the symbol (v >> shift) + 31 and
its `shift` lower bits as they are. Values whose symbol has no frequency are whole among the
escaped ones, after symbol 63. Source: Duda, "Asymmetric numeral systems", 2009.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.kernels.row_coding import ESCAPE, HALF

BITS, LANES, LOW = 14, 4, 1 << 31
Values = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Tables:
    """classes[component], shifts[class], frequencies[class, symbol]."""

    classes: npt.NDArray[np.uint8]
    shifts: npt.NDArray[np.uint8]
    frequencies: npt.NDArray[np.uint16]

    def of(self, component: int) -> tuple[int, list[int], list[int]]:
        """Shift, frequencies, and where each symbol's slots start."""
        which = int(self.classes[component])
        row = self.frequencies[which].astype(int)
        return int(self.shifts[which]), row.tolist(), (np.cumsum(row) - row).tolist()


def encode(values: Values, tables: Tables) -> bytes:
    """The page of values[component, row]."""
    states, words, escaped = [LOW] * LANES, [], []

    def make_room(lane: int, limit: int) -> None:
        if states[lane] >= limit:
            words.append(states[lane] & 0xFFFFFFFF)
            states[lane] >>= 32

    for component in reversed(range(len(values))):
        shift, frequencies, starts = tables.of(component)
        for row in reversed(range(values.shape[1])):
            value, lane = int(values[component, row]), row % LANES
            symbol = (value >> shift) + HALF
            if not (0 <= symbol < ESCAPE and frequencies[symbol]):
                symbol = ESCAPE
                escaped.append(value)
            elif shift:
                make_room(lane, LOW << 32 >> shift)
                states[lane] = states[lane] << shift | value & (1 << shift) - 1
            make_room(lane, (LOW >> BITS << 32) * frequencies[symbol])
            upper, lower = divmod(states[lane], frequencies[symbol])
            states[lane] = (upper << BITS) + lower + starts[symbol]
    head = struct.pack("<2I4Q", len(words), len(escaped), *states)
    body = np.array(words[::-1], "<u4").tobytes() + np.array(escaped[::-1], "<i2").tobytes()
    return head + body


def decode(page: bytes, n_rows: int, tables: Tables) -> Values | None:
    """values[component, row] of a page; None for bytes that `encode` does not write."""
    head = struct.calcsize("<2I4Q")
    if len(page) < head:
        return None
    n_words, n_escaped, *states = struct.unpack("<2I4Q", page[:head])
    if len(page) != head + 4 * n_words + 2 * n_escaped:
        return None
    if not all(LOW <= state < LOW << 32 for state in states):
        return None
    words = np.frombuffer(page, "<u4", n_words, head).tolist()[::-1]
    escaped = np.frombuffer(page, "<i2", n_escaped, head + 4 * n_words).tolist()[::-1]
    values = np.zeros((len(tables.classes), n_rows), np.int16)
    try:
        for component in range(len(values)):
            shift, frequencies, starts = tables.of(component)
            slots = np.repeat(np.arange(len(frequencies)), frequencies)
            for row in range(n_rows):
                values[component, row] = _take(
                    states, row % LANES, words, escaped, (shift, frequencies, starts, slots)
                )
    except IndexError:
        return None
    return values if states == [LOW] * LANES and not words and not escaped else None


def _take(
    states: list[int],
    lane: int,
    words: list[int],
    escaped: list[int],
    table: tuple[int, list[int], list[int], npt.NDArray[np.int64]],
) -> int:
    shift, frequencies, starts, slots = table

    def refill() -> None:
        if states[lane] < LOW:
            states[lane] = states[lane] << 32 | words.pop()

    slot = states[lane] & (1 << BITS) - 1
    symbol = int(slots[slot])
    states[lane] = frequencies[symbol] * (states[lane] >> BITS) + slot - starts[symbol]
    refill()
    if symbol == ESCAPE:
        return escaped.pop()
    lower = states[lane] & (1 << shift) - 1
    states[lane] >>= shift
    refill()
    return (symbol - HALF) * (1 << shift) + lower
