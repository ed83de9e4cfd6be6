"""State parts of slot files: found by their form, refused if they are of another position or cut off."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest

from towerd.slots.errors import StateError
from towerd.slots.kind import HYBRID, RECURRENT, WHOLE, StateKind
from towerd.slots.slot_states import NO_ROWS, find_state, parse_slot_state, state_part
from towerd.slots.state import BLOB_MAGIC

N = 3
F16, F32 = 1, 0
N_ROWS, HEAD_BYTES, ROW_BYTES = 4, 20, 20
"""Of a recurrent state."""


def recurrent(n: int) -> bytes:
    """The state after `n` tokens of a model with two recurrent layers, as llama.cpp's
    `src/llama-memory-recurrent.cpp` writes it."""
    head = struct.pack("<IiIII", 1, n - 1, 0, 0, 4)
    rows = b"".join(struct.pack("<iQ", F32, 8) + bytes(range(i, i + 8)) for i in range(N_ROWS))
    return head + rows


def attention(n: int, *, has_ext: bool = False, has_v: bool = True) -> bytes:
    """One layer of keys and values of 4 bytes for each of `n` positions."""
    cells = b"".join(
        struct.pack("<iI", i, 1) + (bytes(12) if has_ext else b"") + struct.pack("<i", 0)
        for i in range(n)
    )
    plane = struct.pack("<iQ", F16, 4) + bytes(range(4 * n))
    return struct.pack("<II", 1, n) + cells + struct.pack("<II", 0, 1) + plane * (1 + has_v)


def array(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def test_recurrent() -> None:
    found = find_state(array(recurrent(N)), N)
    assert found.kind is RECURRENT
    assert (found.rows, found.layout, found.n_stream) == (None, NO_ROWS, 1)
    blob = found.checkpoint()
    assert blob[:8].tobytes() == struct.pack("<Ii", BLOB_MAGIC, 0)
    assert state_part(blob).tobytes() == recurrent(N)


@pytest.mark.parametrize("has_v", [True, False])
@pytest.mark.parametrize("has_ext", [True, False])
def test_hybrid(has_ext: bool, has_v: bool) -> None:
    rows = attention(N, has_ext=has_ext, has_v=has_v)
    found = find_state(array(rows + recurrent(N)), N)
    assert found.kind is HYBRID
    assert found.rows is not None
    assert found.rows.rows.p1 == N
    assert (found.layout.cell_ext, bool(found.layout.v)) == (has_ext, has_v)
    assert found.part.tobytes() == recurrent(N)


def test_anything_else_is_whole() -> None:
    for data in (attention(N), attention(N) + recurrent(N + 1), b"what is this"):
        found = find_state(array(data), N)
        assert found.kind is WHOLE
        assert found.part.tobytes() == data
    with pytest.raises(StateError):
        find_state(array(b""), N)


def test_streams_of_a_whole_state() -> None:
    """They are told by the first word, or behind the magic of compressed keys."""
    compressed = struct.pack("<IIII", 0x34565344, 1, 0, 5) + bytes(40)
    for data, n_stream in ((attention(N), 1), (compressed, 5)):
        assert parse_slot_state(array(data), N, WHOLE).n_stream == n_stream


@pytest.mark.parametrize("kind", [RECURRENT, HYBRID], ids=["recurrent", "hybrid"])
def test_what_is_cut_off_is_refused(kind: StateKind) -> None:
    """At every byte but those between two rows, whose number nothing in the state says; and a state of
    another position."""
    before = attention(N) if kind is HYBRID else b""
    data = before + recurrent(N)
    assert parse_slot_state(array(data), N, kind).kind is kind
    between = {len(before) + HEAD_BYTES + ROW_BYTES * i for i in range(N_ROWS)}
    for n in set(range(len(data))) - between:
        with pytest.raises(StateError):
            parse_slot_state(array(data[:n]), N, kind)
    with pytest.raises(StateError):
        parse_slot_state(array(data), N + 1, kind)
