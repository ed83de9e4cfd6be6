"""Symbols out of coded bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.codec.errors import Damaged
from towerd.kernels._native import Mixer, RangeDecoder


def take_ranks(
    mixer: Mixer,
    lane: int,
    decoder: RangeDecoder,
    n: int,
    counts: npt.NDArray[np.uint32] | None = None,
) -> list[int]:
    """The next `n` symbols of a lane; see `Mixer.decode`. Raises Damaged."""
    try:
        ranks: list[int] = mixer.decode(lane, decoder, n, counts).tolist()
    except ValueError as error:
        raise Damaged(f"The blob is damaged: {error}.") from error
    return ranks
