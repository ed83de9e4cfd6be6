"""What a coder asks of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint32]

COUNT_ONE = 1 << 24
"""The sum of a distribution's counts where they are normalised, but for one that every token gets."""


class Predictor(Protocol):
    """A model that reads several texts side by side, one token of each per step."""

    @property
    def n_tokens(self) -> int:
        """Tokens of its vocabulary."""
        ...

    @property
    def n_ctx(self) -> int:
        """Tokens of one text that it can look back at."""
        ...

    @property
    def lanes_max(self) -> int:
        """Texts side by side."""
        ...

    @property
    def window(self) -> int:
        """Tokens of one lane that may be fed at once with the same numbers as one by one."""
        ...

    @property
    def name(self) -> bytes:
        """8 bytes that name the model."""
        ...

    def reset(self) -> None:
        """Forget all texts."""
        ...

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        """Append tokens to some lanes, (lane, id) in order of lane, up to `window` for each; for
        each token the chances of what follows it: uint32[n_tokens], each at least 1 and at most
        COUNT_ONE + 1, in proportion.

        The same calls in the same order since a reset give the same counts."""
        ...


@runtime_checkable
class CopyablePredictor(Predictor, Protocol):
    """One that is quickly made again."""

    def copy(self) -> Predictor:
        """Another one of the same model, with texts of its own."""
        ...
