"""ServedAnswer: the next-token distributions that an answer from moved rows was sampled from.

They are compared with those of exact evaluation in idle time, which gives the drift of what was served.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TOKENS_MAX = 64
"""Distributions that are kept of an answer: its first."""
_LIKELY_MAX = 256
_NATS_MAX = 12.0
"""Tokens less likely than the likeliest by more than this are counted together."""

Logits = npt.NDArray[np.float32]


class ServedAnswer:
    """Distributions at positions [start, start + n): of the tokens that follow them."""

    def __init__(self, start: int) -> None:
        """start: the position of the last token of the prompt"""
        self.start = start
        self._served: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]] = []
        self._kl: dict[int, float] = {}

    @property
    def end(self) -> int:
        """The position after the last one that has a distribution."""
        return self.start + len(self._served)

    @property
    def is_full(self) -> bool:
        """Whether no more are kept."""
        return len(self._served) == TOKENS_MAX

    @property
    def kl(self) -> float | None:
        """Mean KL divergence of what was served from exact evaluation, in nats, over the positions that
        were compared; None if none was. Unlikely tokens count as one."""
        return float(np.mean(list(self._kl.values()))) if self._kl else None

    def cut(self, n: int) -> None:
        """Keep the first `n` distributions: the other tokens were not sent."""
        del self._served[n:]

    def add(self, logits: Logits) -> None:
        """Keep the distribution at the next position. logits: float32[n_vocab]"""
        likely = np.flatnonzero(logits > logits.max() - _NATS_MAX)
        if len(likely) > _LIKELY_MAX:
            likely = likely[np.argpartition(logits[likely], -_LIKELY_MAX)[-_LIKELY_MAX:]]
        self._served.append((likely, _parts(logits, likely)))

    def compare(self, position: int, logits: Logits) -> None:
        """Compare the distribution of exact evaluation at a position within [start, end)."""
        likely, served = self._served[position - self.start]
        exact = _parts(logits, likely)
        self._kl[position] = float((exact * (np.log(exact) - np.log(served))).sum())


def _parts(logits: Logits, likely: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """The probabilities of the `likely` tokens, and of all others together."""
    most = float(logits.max())
    total = float(np.exp(logits - most).sum(dtype=np.float64))
    parts = np.exp(logits[likely].astype(np.float64) - most) / total
    rest = max(1.0 - float(parts.sum()), 1e-9)
    return np.append(parts, rest)
