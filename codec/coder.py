"""Binary decisions to bits and back: constriction's range coder.

Probabilities are integers out of 65536. The coder gets them as float64 (exact) and truncates them
to 24 bits without searching for the best fit (`perfect=False`), so every machine writes the same
bits. The output has no trailing zero bytes; the decoder adds them again. Reading has a C++ twin,
because a call for each decision would take most of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from constriction import stream

from towerd.codec.errors import Damaged
from towerd.kernels.mixing import Decisions, Mixer, native

U32 = npt.NDArray[np.uint32]

_SCALE = 65536
_MODELS: dict[int, Any] = {}
"""One model object per probability that has occurred, at most 65,535."""


class Encoder:
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


class Decoder:
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


def make_decoder(mixer: Mixer, data: bytes) -> Decisions:
    """A decoder that this mixer can read from."""
    kernels = native()
    if kernels is None or not isinstance(mixer, kernels.Mixer):
        return Decoder(data)
    decoder: Decisions = kernels.RangeDecoder(data)
    return decoder


def take_ranks(
    mixer: Mixer, lane: int, decoder: Decisions, n: int, counts: U32 | None = None
) -> list[int]:
    """The next `n` symbols of a lane; see `Mixer.decode`. Raises Damaged."""
    try:
        ranks: list[int] = mixer.decode(lane, decoder, n, counts).tolist()
    except ValueError as error:
        raise Damaged(f"The blob is damaged: {error}.") from error
    return ranks
