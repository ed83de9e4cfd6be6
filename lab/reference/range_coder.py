"""The range coder of constriction, call by call: what the kernels' own is compared with.

Probabilities are integers out of 65536. The coder gets them as float64 (exact) and truncates them
to 24 bits without searching for the best fit (`perfect=False`), so every machine writes the same
bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from constriction import stream

_SCALE = 65536
_MODELS: dict[int, Any] = {}
"""One model object per probability that has occurred, at most 65,535."""


class ReferenceEncoder:
    """Collects decisions."""

    def __init__(self) -> None:
        self._coder = stream.queue.RangeEncoder()

    def put(self, bits: npt.NDArray[np.int32], chances: npt.NDArray[np.float64]) -> None:
        """Append decisions[n], each with the probability [n] that it is 1, in (0, 1)."""
        if len(bits):
            self._coder.encode(bits, stream.model.Bernoulli(perfect=False), chances)

    def finish(self) -> bytes:
        """The bytes of all decisions."""
        words = self._coder.get_compressed()
        return bytes(words.astype("<u4").tobytes().rstrip(b"\0"))


class ReferenceDecoder:
    """Decodes decisions. Most bytes decode to something, so the caller must check the result."""

    def __init__(self, data: bytes) -> None:
        words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint32)
        self._coder = stream.queue.RangeDecoder(words)

    def take(self, probability: int) -> int:
        """The next decision, which is 1 with `probability` out of 65536. ValueError for bytes that
        no encoder writes."""
        model = _MODELS.get(probability)
        if model is None:
            model = _MODELS[probability] = stream.model.Bernoulli(
                probability / _SCALE, perfect=False
            )
        try:
            return int(self._coder.decode(model))
        except AssertionError as error:
            raise ValueError(str(error)) from error
