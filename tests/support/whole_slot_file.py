"""A whole slot file, parsed and written again."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError
from towerd.slots.layout import STATE_VERSION
from towerd.slots.reader import ByteReader, Data
from towerd.slots.slotfile import FILE_MAGIC, HEADER_BYTES, parse_tokens, token_section
from towerd.slots.state import SequenceState, parse_state


@dataclass(frozen=True, slots=True, eq=False)
class SlotFile:
    """A parsed slot file. tokens: int32[n]; packed: the token section is llama-server's."""

    tokens: npt.NDArray[np.int32]
    state: SequenceState
    packed: bool = True

    def to_bytes(self) -> bytes:
        """The file, byte for byte as it was parsed."""
        section = token_section(self.tokens, self.packed)
        out = np.empty(HEADER_BYTES + section.nbytes + self.state.nbytes, np.uint8)
        self.state.write(_write_head(out, section))
        return out.tobytes()


def parse_slot_file(data: Data) -> SlotFile:
    """Parse a slot file; rows are views into `data` where its order allows.

    StateError for another version, for tokens that stand for media, and for whatever
    `parse_blob` refuses. The token count is not compared with the cells: llama.cpp does not promise
    it."""
    reader = ByteReader(data)
    magic = reader.u32("magic")
    if magic != FILE_MAGIC:
        raise StateError(f"not a slot file: magic is {magic:#010x}, not {FILE_MAGIC:#010x}")
    version = reader.u32("version")
    if version != STATE_VERSION:
        raise StateError(f"slot file version {version}; this build reads {STATE_VERSION}")
    n_words = reader.u32("token section size")
    words = reader.take(4 * n_words, f"token section of {n_words} words").view("<i4")
    tokens, packed = parse_tokens(words)
    state = parse_state(reader, cell_ext=False)
    return SlotFile(tokens, state, packed)


def _write_head(
    out: npt.NDArray[np.uint8], section: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
    """Write header and token section; returns the rest of `out`, for the state."""
    struct.pack_into("<III", out.data, 0, FILE_MAGIC, STATE_VERSION, len(section))
    end = HEADER_BYTES + section.nbytes
    out[HEADER_BYTES:end] = section.view(np.uint8)
    return out[end:]
