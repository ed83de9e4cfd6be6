"""Training objectives: an objective gives the loss of some windows of text."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.train.data.corpus import Windows
from lab.train.model.network import EMBEDDING, NetworkShape, Weights, device_of, hidden


class Objective(Protocol):
    """The loss of numbered windows."""

    def loss(self, weights: Weights, shape: NetworkShape, first: int, n: int) -> Tensor:
        """Mean loss, nats per token, of windows first to first + n."""
        ...


class TextObjective:
    """Prediction of the next token of the text."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def loss(self, weights: Weights, shape: NetworkShape, first: int, n: int) -> Tensor:
        """Cross entropy."""
        rows = self._windows.batch(first, n).astype(np.int64)
        tokens = torch.from_numpy(rows).to(device_of(weights))
        x = hidden(weights, shape, tokens[:, :-1]).flatten(0, 1)
        return F.cross_entropy(F.linear(x, weights[EMBEDDING]), tokens[:, 1:].flatten())
