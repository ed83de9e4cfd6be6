"""Predictors in Python, and how texts that are coded with them are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from towerd.codec.forms import network
from towerd.codec.models.exact import ExactPredictor
from towerd.kernels._native import Mixer, RangeDecoder
from towerd.kernels.lm import Counts


class FedPredictor(ExactPredictor):
    """A predictor without a model: subclasses answer `feed` and `reset`. See `read_in_python`."""

    def __init__(self, n_tokens: int, n_ctx: int, lanes_max: int, name: bytes) -> None:
        self.n_tokens, self.n_ctx, self.lanes_max, self.name = n_tokens, n_ctx, lanes_max, name
        self.instead = 0
        self.lm: Any = self

    def within(self, n_ctx: int) -> FedPredictor:
        return self

    def reset(self) -> None: ...

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        raise NotImplementedError


def read_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have chunks of FedPredictors read by `read_one_by_one`, until the test ends."""
    in_cpp: Any = vars(network)["read_side_by_side"]

    def read(models: Sequence[Any], *rest: Any) -> list[list[int]]:
        in_python = isinstance(models[0], FedPredictor)
        return read_one_by_one(models, *rest) if in_python else in_cpp(models, *rest)

    monkeypatch.setattr(network, "read_side_by_side", read)


def read_one_by_one(
    models: Sequence[FedPredictor],
    mixer: Mixer,
    decoders: Sequence[RangeDecoder],
    sizes: Sequence[int],
    order: npt.NDArray[np.int64],
    first: int,
    instead: int,
) -> list[list[int]]:
    """The ranks of each text: the specification of kernels/cpp/side_by_side.cpp."""
    ranks: list[list[int]] = [[] for _ in sizes]
    last = [first] * len(sizes)
    for step in range(max(sizes, default=0)):
        lanes = [lane for lane, size in enumerate(sizes) if step < size]
        found = models[0].feed([(lane, last[lane]) for lane in lanes])
        for lane, counts in zip(lanes, found, strict=True):
            ranks[lane] += mixer.decode(lane, decoders[lane], 1, counts[order]).tolist()
            last[lane] = int(order[ranks[lane][-1]])
    return ranks
