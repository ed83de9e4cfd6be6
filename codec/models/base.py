"""The interface of a language model to a coder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint32]

COUNT_ONE = 1 << 24
"""The sum of a normalised distribution's counts, without the 1 that every token gets."""


class TokenPredictor(Protocol):
    """A language model that reads several texts (lanes) side by side."""

    @property
    def n_tokens(self) -> int:
        """Tokens of its vocabulary."""
        ...

    @property
    def n_ctx(self) -> int:
        """Tokens of one text that it can attend to."""
        ...

    @property
    def lanes_max(self) -> int:
        """Texts that it can read side by side."""
        ...

    @property
    def window(self) -> int:
        """Tokens of one lane that may be fed at once without changing the counts."""
        ...

    @property
    def name(self) -> bytes:
        """8 bytes that name the model."""
        ...

    def reset(self) -> None:
        """Forget all texts."""
        ...

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        """Append tokens to some lanes, as (lane, id) in order of lane, up to `window` for each.
        Returns for each token the distribution of the next one: uint32[n_tokens] counts that are
        proportional to the probabilities, each from 1 to COUNT_ONE + 1.

        The same calls in the same order since a reset give the same counts."""
        ...


@runtime_checkable
class CopyablePredictor(TokenPredictor, Protocol):
    """A predictor that can be copied quickly."""

    def within(self, n_ctx: int) -> CopyablePredictor:
        """A new predictor of the same model that attends to at most `n_ctx` tokens of a text."""
        ...

    def copy(self) -> CopyablePredictor:
        """A new predictor of the same model, with lanes of its own."""
        ...
