"""The slot file of `POST /slots/{id}?action=save` and `llama_state_seq_save_file`.

    u32 magic | u32 version | u32 n_words | i32[n_words] token section | state
The server packs the section as -1, 1, n, tokens, n_media; a plain list of tokens is also read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.slots.compose import state_size
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout

FILE_MAGIC = 0x67677371
HEADER_BYTES = 12
PACKED = -1
PACKED_VERSION = 1


def token_section(tokens: npt.NDArray[np.int32], packed: bool) -> npt.NDArray[np.int32]:
    """The words of the token section. StateError for negative ids."""
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise StateError("tokens must be int32 of one dimension")
    if (tokens < 0).any():
        raise StateError("token ids must not be negative")
    if not packed:
        return tokens.astype("<i4")
    return np.concatenate([[PACKED, PACKED_VERSION, len(tokens)], tokens, [0]]).astype("<i4")


def slot_file_bytes(layout: KVLayout, n_tokens: int) -> int:
    """The size of a slot file with the rows of `n_tokens` tokens, one stream, packed."""
    packed_words = 4
    return HEADER_BYTES + 4 * (packed_words + n_tokens) + state_size(layout, n_tokens, 1)


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
