"""Words as predictors see them: signed counts in N_TEXT cells (Weinberger et al. 2009), length 1.

PBKV takes the model's own hidden state after the prompt (section 4.1 (iii)). Hashed words serve
any vocabulary with the same weights.
"""

from __future__ import annotations

import re

import numpy as np
import xxhash

from towerd.policy.predict.steps import N_TEXT, Vector

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
