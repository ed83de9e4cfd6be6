"""Hostile bytes: StateError or a faithful parse, never a crash, never outsized memory."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_slot_file import SlotFile, parse_slot_file

from towerd.slots.blob import parse_blob
from towerd.slots.compose import STREAMS_MAX
from towerd.slots.errors import StateError

Blobs = dict[str, tuple[bytes, bool]]
NAMES = ["f16", "q8_0", "v_trans", "streams", "permuted", "mrope", "mla"]
WORDS = st.sampled_from([0, 1, 2, 3, 255, 256, 257, 1 << 16, 1 << 31, (1 << 32) - 1]) | st.integers(
    0, (1 << 32) - 1
)
FUZZ = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, float, int]]:
    """A few edits: (kind, place as a fraction of the length, a word). Half of the places lie
    among the headers at the front."""
    place = st.floats(0, 1) | st.floats(0, 0.1)
    kind = st.sampled_from(["word", "long", "byte", "cut", "drop", "insert", "repeat"])
    return draw(st.lists(st.tuples(kind, place, WORDS), min_size=1, max_size=3))


def _edited(data: bytes, changes: list[tuple[str, float, int]]) -> bytes:
    out = bytearray(data)
    for kind, place, word in changes:
        at = int(place * len(out)) & ~3
        if kind == "word":
            out[at : at + 4] = struct.pack("<I", word)
        elif kind == "long":
            out[at : at + 8] = struct.pack("<Q", word << 32 | word)
        elif kind == "byte":
            out[at : at + 1] = bytes([word & 255])
        elif kind == "cut":
            del out[at:]
        elif kind == "drop":
            del out[at : at + 4]
        elif kind == "insert":
            out[at:at] = struct.pack("<I", word)
        else:
            out[at:at] = out[at : at + word % 64]
    return bytes(out)


@pytest.mark.parametrize("name", NAMES)
@given(changes=edits())
@FUZZ
def test_edited_blobs(real_blobs: Blobs, name: str, changes: list[tuple[str, float, int]]) -> None:
    """An edited blob is refused, or it parses and emits exactly its own bytes again."""
    blob, cell_ext = real_blobs[name]
    data = _edited(blob, changes)
    try:
        state = parse_blob(data, cell_ext=cell_ext)
    except StateError:
        return
    assert state.to_bytes() == data


@given(changes=edits(), packed=st.booleans())
@FUZZ
def test_edited_slot_files(
    real_blobs: Blobs, changes: list[tuple[str, float, int]], packed: bool
) -> None:
    """The same for slot files."""
    state = parse_blob(real_blobs["f16"][0])
    tokens = np.arange(len(state.rows), dtype=np.int32)
    data = _edited(SlotFile(tokens, state, packed).to_bytes(), changes)
    try:
        parsed = parse_slot_file(data)
    except StateError:
        return
    assert parsed.to_bytes() == data


@given(data=st.binary(max_size=300), prefix=st.booleans())
@FUZZ
def test_noise(data: bytes, prefix: bool) -> None:
    """Arbitrary bytes, with or without a right beginning."""
    with pytest.raises(StateError):
        parse_blob(struct.pack("<I", 0xAF143CD8) + data if prefix else data)
    with pytest.raises(StateError):
        parse_slot_file(struct.pack("<II", 0x67677371, 3) + data if prefix else data)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_everywhere(real_blobs: Blobs, name: str) -> None:
    """Every proper prefix is refused once the layout is known; so is a trailing byte."""
    blob, cell_ext = real_blobs[name]
    layout = parse_blob(blob, cell_ext=cell_ext).rows.layout
    for end in range(len(blob)):
        with pytest.raises(StateError):
            parse_blob(blob[:end], cell_ext=cell_ext, layout=layout)
    with pytest.raises(StateError):
        parse_blob(blob + b"\0", cell_ext=cell_ext)


def _blob(*words: int, n_stream: int = 1) -> bytes:
    return struct.pack("<II", 0xAF143CD8, 0) + struct.pack(f"<{len(words) + 1}I", n_stream, *words)


CELL = (7, 1, 0)  # position, number of sequences, sequence
HUGE = {
    "cells": _blob(0xFFFFFFFF),
    "streams": _blob(*[0] * 64, n_stream=0xFFFFFFFF),
    "layers": _blob(1, *CELL, 0, 0xFFFFFFFF, 1, 128, 0),
    "row": _blob(1, *CELL, 0, 1, 1, 0xFFFFFFF0, 0xFFFFFFFF),
    "row16m": _blob(1, *CELL, 0, 1, 1, 1 << 24, 0),
    "channels": _blob(1, *CELL, 1, 1, 1, 2, 0, 0, 1, 2, 0xFFFFFFFF),
    "tokens": struct.pack("<III", 0x67677371, 3, 0xFFFFFFFF),
}


@pytest.mark.parametrize("name", HUGE)
def test_declared_sizes_do_not_allocate(name: str) -> None:
    """A huge count in a tiny input costs next to nothing before it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(StateError):
            (parse_slot_file if name == "tokens" else parse_blob)(HUGE[name])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_bounded_by_the_input(real_blobs: Blobs, name: str) -> None:
    """Parsing allocates a few times the input at most, even when rows must be moved."""
    blob, cell_ext = real_blobs[name]
    tracemalloc.start()
    try:
        parse_blob(blob, cell_ext=cell_ext)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(blob) + 100_000
    finally:
        tracemalloc.stop()


SECTION = (1, 4, 0, 0xAAAAAAAA)  # f16, rows of 4 bytes (u64), one row


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "buffer|truncated"),
        (b"\0" * 64, "magic"),
        (_blob(0), "no cells"),
        (_blob(0, n_stream=0), "n_stream"),
        (_blob(*[0] * (STREAMS_MAX + 1), n_stream=STREAMS_MAX + 1), "n_stream"),
        (_blob(1, 0x80000000, 1, 0, 0, 1, *SECTION), "negative"),
        (_blob(2, *CELL, *CELL, 0, 1, 1, 4, 0, 5, 6), "same position"),
        (_blob(1, 7, 2, 0, 0, 1, *SECTION), "exactly one sequence"),
        (_blob(1, 7, 1, 3, 0, 1, *SECTION), "sequence 3"),
        (_blob(2, 7, 1, 0, 8, 1, 1, 0, 1, 1, 4, 0, 5, 6), "different"),
        (_blob(1, *CELL, 2, 1, *SECTION), "v_trans"),
        (_blob(1, *CELL, 0, 0, *SECTION), "n_layer"),
        (_blob(1, *CELL, 0, 1, 99, 4, 0, 0), "type 99"),
        (_blob(1, *CELL, 0, 1, 1, 0, 0), "row of 0"),
        (_blob(1, *CELL, 0, 1, 8, 36, 0, *[0] * 9), "q8_0 blocks"),
        (_blob(1, *CELL, 1, 1, *SECTION, 8, 34, 1, *[0] * 9), "transposed"),
        (_blob(1, *CELL, 1, 1, *SECTION, 1, 4, 1, 0), "elements of 4"),
        (_blob(1, *CELL, 0, 1, *SECTION, 0, n_stream=1), "truncated"),
        (_blob(*[1, *CELL, 0, 1, *SECTION, *SECTION] * 2, n_stream=2), "more than one stream"),
        (_blob(1, *CELL, 0, 1, *SECTION, *SECTION, 0, n_stream=1), "follow the end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(blob: bytes, message: str) -> None:
    """Each kind of damage is named."""
    with pytest.raises(StateError, match=message):
        parse_blob(blob)


def test_small_valid_blob() -> None:
    """The hand-made pieces above do make a valid blob."""
    state = parse_blob(_blob(0, 1, *CELL, 0, 1, *SECTION, *SECTION, 0, n_stream=3))
    assert (state.frame.stream, state.rows.p0, len(state.rows.layout.v)) == (1, 7, 1)
    assert bytes(state.rows.v[0]) == b"\xaa" * 4


@pytest.mark.parametrize(
    "value", ["text", None, 5, np.zeros((4, 4), np.uint8)[:, ::2], memoryview(b"abcd")[::2]]
)
def test_not_bytes(value: object) -> None:
    """Anything but a contiguous buffer is refused."""
    with pytest.raises(StateError):
        parse_blob(value)  # type: ignore[arg-type]
