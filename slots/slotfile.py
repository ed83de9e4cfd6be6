"""The slot file of `POST /slots/{id}?action=save` and `llama_state_seq_save_file`.

    u32 magic | u32 version | u32 n_words | i32[n_words] token section | state
The server packs the section as -1, 1, n, tokens, n_media; a plain list of tokens is also read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError
from towerd.slots.layout import STATE_VERSION, KVLayout
from towerd.slots.reader import ByteReader, Data
from towerd.slots.state import SequenceState, check_layout, parse_state

FILE_MAGIC = 0x67677371
HEADER_BYTES = 12
PACKED = -1
PACKED_VERSION = 1


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


def parse_slot_file(
    data: Data, *, cell_ext: bool = False, layout: KVLayout | None = None
) -> SlotFile:
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
    state = parse_state(reader, cell_ext=cell_ext)
    check_layout(state.rows.layout, layout)
    return SlotFile(tokens, state, packed)


def token_section(tokens: npt.NDArray[np.int32], packed: bool) -> npt.NDArray[np.int32]:
    """The words of the token section. StateError for negative ids."""
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise StateError("tokens must be int32 of one dimension")
    if (tokens < 0).any():
        raise StateError("token ids must not be negative")
    if not packed:
        return tokens.astype("<i4")
    return np.concatenate([[PACKED, PACKED_VERSION, len(tokens)], tokens, [0]]).astype("<i4")


def parse_tokens(words: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], bool]:
    """The tokens of a section and whether it was packed. StateError unless it is one of the
    two forms, text only."""
    packed = len(words) > 0 and words[0] == PACKED
    tokens = words.astype(np.int32)
    if packed:
        if len(words) < 4 or words[1] != PACKED_VERSION:
            raise StateError("the packed token section is truncated or of another version")
        n = int(words[2])
        if not 0 <= n <= len(words) - 4:
            raise StateError(f"{n} tokens in a token section of {len(words)} words")
        if words[3 + n] != 0:
            raise StateError("slot files with media are not supported")
        if n != len(words) - 4:
            raise StateError("words follow the end of the packed token section")
        tokens = tokens[3 : 3 + n]
    if (tokens < 0).any():
        raise StateError("a token id is negative (media are not supported)")
    return tokens, packed


def _write_head(
    out: npt.NDArray[np.uint8], section: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
    """Write header and token section; returns the rest of `out`, for the state."""
    struct.pack_into("<III", out.data, 0, FILE_MAGIC, STATE_VERSION, len(section))
    end = HEADER_BYTES + section.nbytes
    out[HEADER_BYTES:end] = section.view(np.uint8)
    return out[end:]
