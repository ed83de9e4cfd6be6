"""Training the graph predictor in torch, on workflows as the daemon records or traces hold them.

Every step is an example: its inputs are the path so far and the last step's meaning, its targets
the next N_STEPS steps; END is a target, and everything after it is masked (appendix B). A share of
the workflows is held out, with runs of one task together, for early stopping and to calibrate each
head's temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from lab.predict.runs import FinishedRun, split
from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.graph import HIDDEN, PATH_MAX, UNKNOWN, WIDTH, GraphWeights, shapes
from towerd.policy.predict.steps import N_TEXT

_BATCH = 256
_EPOCH_MAX = 4096
"""Maximum number of examples in an epoch; if there are more, each epoch draws a sample."""
_PATIENCE = 4
_DROPOUT = 0.3
_DROP_TEXT = 0.1
_DROP_AGENT = 0.02
_IGNORED = -100
_FIXED = ("transitions", "temperature")
Progress: TypeAlias = Callable[[int, float, float], None]
"""Called with the epoch and the losses on training and on held-out examples."""


@dataclass(slots=True)
class StepExamples:
    """paths: int64 [n, PATH_MAX + 1], the current step first, then those before it, padded with
    -1; texts: float32 [n, N_TEXT]; targets: int64 [n, N_STEPS]."""

    paths: torch.Tensor
    texts: torch.Tensor
    targets: torch.Tensor


def train(
    runs: Sequence[FinishedRun],
    *,
    epochs: int = 40,
    seed: int = 0,
    progress: Progress | None = None,
) -> GraphWeights:
    """Weights learned from `runs`, the best epoch by held-out loss. Raises ValueError when there
    are fewer than two runs with steps."""
    runs = [run for run in runs if run.steps]
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} workflows are too few to learn from")
    torch.manual_seed(seed)
    learned, held = split(runs, 0.15, seed)
    agents = tuple(sorted({name for run in learned for name in run.steps}))
    numbers = {name: 1 + i for i, name in enumerate(agents)}
    weights = _initial(learned, numbers)
    free = [tensor for name, tensor in weights.items() if name not in _FIXED]
    optimizer = torch.optim.AdamW(free, lr=2e-3, weight_decay=0.02)
    examples, checks = examples_of(learned, numbers), examples_of(held, numbers)
    best = {name: tensor.detach().clone() for name, tensor in weights.items()}
    best_loss, n_worse = float("inf"), 0
    for epoch in range(epochs):
        loss = _epoch(weights, examples, optimizer)
        with torch.no_grad():
            check = float(_loss(logits_of(weights, checks.paths, checks.texts), checks.targets))
        if progress is not None:
            progress(epoch, loss, check)
        n_worse = 0 if check < best_loss else n_worse + 1
        if check < best_loss:
            best_loss = check
            best = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if n_worse > _PATIENCE:
            break
    _calibrate(best, checks)
    return GraphWeights(agents, {name: tensor.numpy() for name, tensor in best.items()})


def _initial(runs: Sequence[FinishedRun], numbers: dict[str, int]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes(1 + len(numbers)).items():
        scale = 1.0 if name == "embedding" else (2.0 / shape[-1]) ** 0.5
        tensor = torch.zeros(shape) if name.startswith("b") else torch.randn(shape) * scale
        weights[name] = tensor.requires_grad_(name not in _FIXED)
    weights["temperature"] = torch.ones(N_STEPS)
    counts = torch.zeros(1 + len(numbers), 1 + len(numbers))
    for run in runs:
        for a, b in pairwise(run.steps):
            counts[numbers[a], numbers[b]] += 1.0
    weights["transitions"] = counts / counts.sum(1, keepdim=True).clamp(min=1.0)
    return weights


def examples_of(runs: Sequence[FinishedRun], numbers: dict[str, int]) -> StepExamples:
    n = sum(len(run.steps) for run in runs)
    paths = np.full((n, PATH_MAX + 1), -1, np.int64)
    texts = np.zeros((n, N_TEXT), np.float32)
    targets = np.full((n, N_STEPS), _IGNORED, np.int64)
    end, row = 1 + len(numbers), 0
    for run in runs:
        codes = [numbers.get(name, UNKNOWN) for name in run.steps]
        for t in range(len(codes)):
            recent = codes[max(0, t + 1 - PATH_MAX) : t + 1][::-1]
            paths[row, : len(recent)] = recent
            if run.meanings:
                texts[row] = run.meanings[t]
            for k, code in enumerate([*codes[t + 1 : t + 1 + N_STEPS], end][:N_STEPS]):
                targets[row, k] = code if code != UNKNOWN else _IGNORED
            row += 1
    return StepExamples(torch.from_numpy(paths), torch.from_numpy(texts), torch.from_numpy(targets))


def _epoch(
    weights: dict[str, torch.Tensor], examples: StepExamples, optimizer: torch.optim.Optimizer
) -> float:
    order = torch.randperm(len(examples.paths))[:_EPOCH_MAX]
    total = 0.0
    for rows in order.split(_BATCH):
        paths, texts = examples.paths[rows].clone(), examples.texts[rows].clone()
        paths[(torch.rand(paths.shape) < _DROP_AGENT) & (paths >= 0)] = UNKNOWN
        texts *= (torch.rand(len(rows), 1) >= _DROP_TEXT).float()
        loss = _loss(logits_of(weights, paths, texts, dropout=_DROPOUT), examples.targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(rows)
    return total / len(order)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


def logits_of(
    w: dict[str, Any], paths: torch.Tensor, texts: torch.Tensor, dropout: float = 0.0
) -> torch.Tensor:
    """float [n, N_STEPS, outcomes]; the same sums as GraphPredictor.logits."""
    h, a = w["embedding"], w["transitions"]
    for name in ("w1", "w2"):
        h = torch.relu(torch.cat([h, a @ h], 1) @ w[name].T)
    current, before, known = h[paths[:, 0]], h[paths[:, 1:].clamp(min=0)], paths[:, 1:] >= 0
    scores = (before @ (current @ w["wq"].T).unsqueeze(2)).squeeze(2) / WIDTH**0.5
    scores = scores.masked_fill(~known, -1e9)
    shares = torch.softmax(scores, 1) * known.any(1, keepdim=True)
    history = (shares.unsqueeze(1) @ before).squeeze(1)
    text = torch.relu(texts @ w["wt"].T)
    fused = torch.cat([current, history, text], 1)
    hidden = torch.relu(functional.dropout(fused, dropout, dropout > 0) @ w["w3"].T + w["b3"])
    assert hidden.shape[1] == HIDDEN
    flat = functional.dropout(hidden, dropout, dropout > 0) @ w["w4"].T + w["b4"]
    return flat.view(len(paths), N_STEPS, -1) / w["temperature"][:, None]


def _calibrate(weights: dict[str, torch.Tensor], checks: StepExamples) -> None:
    """Set each head's temperature: the best of a grid by held-out loss (Guo et al. 2017)."""
    with torch.no_grad():
        logits = logits_of(weights, checks.paths, checks.texts)
        for k in range(N_STEPS):
            grid = [0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.8, 2.2, 2.8]
            losses = [
                float(_loss(logits[:, k : k + 1] / t, checks.targets[:, k : k + 1])) for t in grid
            ]
            finite = [loss if loss == loss else float("inf") for loss in losses]
            weights["temperature"][k] = grid[finite.index(min(finite))]
