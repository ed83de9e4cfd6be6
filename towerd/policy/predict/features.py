"""What trained predictors see of a step besides its name: a vector of its meaning.

PBKV takes the model's own hidden state after the prompt (section 4.1 (iii)). Here words are
hashed: signed counts in N_TEXT cells (Weinberger et al. 2009), length 1, so that the same weights
serve any vocabulary. What the daemon's policies hear has names and no words.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]
N_TEXT = 384
_CHARS_MAX = 2000
_WORD = re.compile(r"[A-Za-z]+|\d")


def hash_text(text: str) -> Vector:
    """float32 [N_TEXT] of length 1, or zeros for a text without words. The last _CHARS_MAX
    characters count."""
    cells = np.zeros(N_TEXT, np.float32)
    for word in _WORD.findall(text[-_CHARS_MAX:]):
        code = xxhash.xxh64_intdigest(word.lower().encode())
        cells[code % N_TEXT] += 1.0 if code >> 63 else -1.0
    norm = float(np.linalg.norm(cells))
    return cells / np.float32(norm) if norm else cells
