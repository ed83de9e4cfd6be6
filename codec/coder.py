"""Binary decisions to bits and back: constriction's range coder.

Probabilities are integers out of 65536 and reach the coder as float64 (exact), which it cuts to
24 bits without the search for a best fit (`perfect=False`): the same bits on every machine. The
output is bytes without the zeros at its end, which reading puts back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from constriction import stream

from towerd.codec.errors import Damaged

_SCALE = 65536
_MODELS: dict[int, Any] = {}
"""One model object per probability that ever occurred, at most 65,535."""


class Encoder:
    """Collects decisions."""

    def __init__(self) -> None:
        self._coder = stream.queue.RangeEncoder()

    def put(self, bits: npt.NDArray[np.int32], chances: npt.NDArray[np.float64]) -> None:
        """Append decisions[n], each with the probability [n] that it is 1, in (0, 1)."""
        if len(bits):
            self._coder.encode(bits, stream.model.Bernoulli(perfect=False), chances)

    def finish(self) -> bytes:
        """Everything that was put."""
        words = self._coder.get_compressed()
        return bytes(words.astype("<u4").tobytes().rstrip(b"\0"))


class Decoder:
    """Gives decisions back. Most bytes decode to something: the caller checks what it got."""

    def __init__(self, data: bytes) -> None:
        words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint32)
        self._coder = stream.queue.RangeDecoder(words)

    def take(self, probability: int) -> int:
        """The next decision, which is 1 with `probability` of 65536. Damaged for bytes that no
        encoder writes."""
        model = _MODELS.get(probability)
        if model is None:
            model = _MODELS[probability] = stream.model.Bernoulli(
                probability / _SCALE, perfect=False
            )
        try:
            return int(self._coder.decode(model))
        except AssertionError as error:
            raise Damaged(f"The blob is damaged: {error}") from error
