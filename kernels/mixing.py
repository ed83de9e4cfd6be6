"""Context mixing: the C++ mixer if it is built, else the Python reference (slow)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from towerd.kernels.dispatch import ENV
from towerd.kernels.reference import mix as reference_mix
from towerd.kernels.reference.mix import (
    FINAL,
    INPUTS,
    LEVELS,
    SETS,
    STATIC,
    Decisions,
    n_maps,
    state_size,
)
from towerd.kernels.reference.mix_lanes import BREAK, DYNAMIC, MATCH_MAX, MATCHES, OPENING, PLAIN

__all__ = [
    "BREAK",
    "DYNAMIC",
    "Decisions",
    "FINAL",
    "INPUTS",
    "LEVELS",
    "MATCHES",
    "MATCH_MAX",
    "OPENING",
    "PLAIN",
    "SETS",
    "STATIC",
    "Mixer",
    "make_mixer",
    "native",
    "n_maps",
    "state_size",
]

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]


class Mixer(Protocol):
    """The interface of both implementations; see `reference.mix.ReferenceMixer`."""

    def reset(self, lanes: int = 1, table_bits: int = 16) -> None: ...
    def begin(self, lane: int, counts: U32 | None = None) -> int: ...
    def step(self, bit: int) -> int: ...
    def encode(
        self, lane: int, ranks: I32, counts: U32 | None = None
    ) -> tuple[I32, npt.NDArray[np.float64]]: ...
    def decode(self, lane: int, decoder: Decisions, n: int, counts: U32 | None = None) -> I32: ...
    def learn(self, lane: int, ranks: I32) -> None: ...
    def state(self) -> U32: ...


def make_mixer(weights: U32, tables: Sequence[tuple[U32, U16]], state: U32, kinds: U8) -> Mixer:
    """A mixer over len(weights) tokens. ValueError if the tables are inconsistent.

    TOWERD_KERNELS=reference forces the Python one; both give the same numbers."""
    kernels = native()
    if kernels is None:
        return reference_mix.ReferenceMixer(weights, tables, state, kinds)
    mixer: Mixer = kernels.Mixer(weights, list(tables), state, kinds)
    return mixer


def native() -> ModuleType | None:
    """The C++ kernels; None if they are not built or TOWERD_KERNELS=reference."""
    if os.environ.get(ENV) == "reference":
        return None
    try:
        from towerd.kernels import _native
    except ImportError:
        return None
    return _native
