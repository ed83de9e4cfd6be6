"""A workflow's state as a served model knows it: logits of a prompt's last token, projected.

Logits are a linear map of the hidden state that PBKV's predictor reads (section 4.1 (iii)), and
they exist wherever a token is sampled. A few thousand of them, centred, are added up with random
signs to N_STATE numbers (Achlioptas 2003), which keeps angles between states up to some 0.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
N_STATE = 64
N_IDS = 4096
_SEED = 20


class LogitProjection:
    """The projection for a vocabulary of `n_vocab` tokens; the same in every process."""

    def __init__(self, n_vocab: int) -> None:
        rng = np.random.default_rng(_SEED)
        n = min(n_vocab, N_IDS)
        self._ids = np.sort(rng.choice(n_vocab, n, replace=False))
        self._signs = (2 * rng.integers(0, 2, (n, N_STATE)) - 1).astype(np.float32)

    def state(self, logits: Floats) -> Floats:
        """float32 [N_STATE] of length 1. logits: float32 [n_vocab]."""
        taken = logits[self._ids]
        state = (taken - taken.mean()) @ self._signs
        found: Floats = unit(state[None])[0]
        return found


def unit(rows: Floats) -> Floats:
    """Rows [n, m] of length 1; zeros stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    found: Floats = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return found
