"""Reading coded texts with a language model: on several cores if the kernels evaluate it.

Each text is a lane of one mixer, which takes a token of each text in turn, so what it learns from
one helps the others from the next step on. The order is the same for any number of cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from towerd.codec.errors import Damaged
from towerd.codec.models.base import TokenPredictor
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.models.marks import MarkedPredictor
from towerd.codec.models.predictor_pool import PredictorPool
from towerd.codec.ranks import take_ranks
from towerd.kernels._native import Mixer, RangeDecoder, read_side_by_side

Order = npt.NDArray[np.int64]
EVALUATED = (ExactPredictor, MarkedPredictor)
"""Predictors whose model the kernel `lm` evaluates."""


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_texts(
    predictors: PredictorPool,
    mixer: Mixer,
    texts: Sequence[tuple[int, bytes]],
    order: Order,
    first: int,
    n_threads: int,
) -> list[list[int]]:
    """The ranks of texts, each given as (its number of symbols, its bits), in the lanes of `mixer`.

    `order` [n]: the model's token of each rank; `first`: the token that every text starts with.
    The C++ kernels evaluate the model on up to `n_threads` cores. Raises Damaged."""
    n = min(n_threads, len(texts))
    with ExitStack() as stack:
        model = stack.enter_context(predictors.borrow())
        if n < 1 or not isinstance(model, EVALUATED):
            return _read_one_by_one(model, mixer, texts, order.tolist(), first)
        others = [stack.enter_context(predictors.borrow()) for _ in range(n - 1)]
        lms = [each.lm for each in (model, *others) if isinstance(each, EVALUATED)]
        decoders = [RangeDecoder(bits) for _, bits in texts]
        sizes = [size for size, _ in texts]
        try:
            return read_side_by_side(lms, mixer, decoders, sizes, order, first, model.instead)
        except ValueError as error:
            raise Damaged(f"The blob is damaged: {error}.") from error


def _read_one_by_one(
    predictor: TokenPredictor,
    mixer: Mixer,
    texts: Sequence[tuple[int, bytes]],
    order: list[int],
    first: int,
) -> list[list[int]]:
    """The same with any predictor: the specification of kernels/cpp/side_by_side.cpp."""
    decoders = [RangeDecoder(bits) for _, bits in texts]
    ranks: list[list[int]] = [[] for _ in texts]
    last = [first] * len(texts)
    for step in range(max((size for size, _ in texts), default=0)):
        lanes = [lane for lane, (size, _) in enumerate(texts) if step < size]
        found = predictor.feed([(lane, last[lane]) for lane in lanes])
        for lane, counts in zip(lanes, found, strict=True):
            ranks[lane] += take_ranks(mixer, lane, decoders[lane], 1, counts[order])
            last[lane] = order[ranks[lane][-1]]
    return ranks
