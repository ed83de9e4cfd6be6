"""Binary decisions to bits and back: constriction's range coder.

The output has no trailing zero bytes; the decoder adds them again. The kernels have a coder of their
own that writes and reads the same bits, and constriction is what the tests compare it with: a call for
each decision would take most of the time, and constriction has no build for Linux on arm64.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from towerd.codec.errors import Damaged
from towerd.errors import NotSupported
from towerd.kernels.mixing import Decisions, Mixer, native

U32 = npt.NDArray[np.uint32]


class Encoder(Protocol):
    """Collects decisions."""

    def put(self, bits: npt.NDArray[np.int32], chances: npt.NDArray[np.float64]) -> None:
        """Append decisions[n], each with the probability [n] that it is 1, in (0, 1)."""
        ...

    def finish(self) -> bytes:
        """The bytes of all decisions."""
        ...


def make_encoder() -> Encoder:
    """An encoder of the kernels, or constriction's."""
    kernels = native()
    coder = _reference().ReferenceEncoder if kernels is None else kernels.RangeEncoder
    encoder: Encoder = coder()
    return encoder


def make_decoder(mixer: Mixer, data: bytes) -> Decisions:
    """A decoder that this mixer can read from."""
    kernels = native()
    if kernels is None or not isinstance(mixer, kernels.Mixer):
        kernels, name = _reference(), "ReferenceDecoder"
    else:
        name = "RangeDecoder"
    decoder: Decisions = getattr(kernels, name)(data)
    return decoder


def _reference() -> ModuleType:
    """constriction's coder, for the reference kernels, which development uses. NotSupported if it
    is not installed."""
    try:
        return import_module("towerd.codec.range_coder.reference")
    except ImportError as error:
        raise NotSupported(
            "The reference kernels code with constriction, which is not installed here: "
            "pip install 'constriction==0.5.*', or leave TOWERD_KERNELS out."
        ) from error


def take_ranks(
    mixer: Mixer, lane: int, decoder: Decisions, n: int, counts: U32 | None = None
) -> list[int]:
    """The next `n` symbols of a lane; see `Mixer.decode`. Raises Damaged."""
    try:
        ranks: list[int] = mixer.decode(lane, decoder, n, counts).tolist()
    except ValueError as error:
        raise Damaged(f"The blob is damaged: {error}.") from error
    return ranks
