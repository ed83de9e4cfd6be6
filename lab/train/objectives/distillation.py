"""The distillation objective: a student learns a teacher's distribution of the next token.

The teacher gives its k likeliest tokens and, as one more outcome, all others together (knowledge
distillation, Hinton and others 2015, on the truncated distribution).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.train.data.corpus import Windows
from lab.train.data.form import Ids
from lab.train.model.network import NetworkShape, Weights, device_of, logits
from lab.train.objectives.teacher import Targets, Teacher

TINY = 1e-9


class DistillationObjective:
    """The Kullback-Leibler divergence of the student's distribution from the teacher's. The folder
    `kept` caches the teacher's distributions of each window."""

    def __init__(
        self, windows: Windows, teacher: Teacher, top_k: int, kept: Path | None = None
    ) -> None:
        self._windows, self._teacher, self._top_k, self._kept = windows, teacher, top_k, kept

    def loss(self, weights: Weights, shape: NetworkShape, first: int, n: int) -> Tensor:
        """Mean divergence, nats per token."""
        device = device_of(weights)
        rows = self._windows.batch(first, n)[:, :-1]
        found = [self._targets(first + i, row) for i, row in enumerate(rows)]
        ids = torch.from_numpy(np.stack([each.ids for each in found])).to(device)
        p = torch.from_numpy(np.stack([each.p for each in found])).to(device)
        scores = logits(weights, shape, torch.from_numpy(rows.astype(np.int64)).to(device))
        return divergence(scores.float(), ids, p)

    def _targets(self, k: int, row: Ids) -> Targets:
        """The teacher's distributions for window k, whose ids are `row`."""
        if self._kept is None:
            return self._teacher.targets(row, self._top_k)
        source, start = self._windows.window(k)
        path = self._kept / f"{source}.{start}.npz"
        if path.exists():
            with np.load(path) as arrays:
                return Targets(arrays["ids"].astype(np.int64), arrays["p"])
        found = self._teacher.targets(row, self._top_k)
        part = path.with_name(f".{path.name}.part")
        with part.open("wb") as file:
            np.savez(file, ids=found.ids.astype(np.uint32), p=found.p)
        os.replace(part, path)
        return found


def divergence(scores: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    """Mean over all positions of KL(teacher || student), nats.

    scores: [..., n_vocab] logits of the student; ids, p: [..., k] likeliest tokens of the teacher
    and their probabilities. The outcomes are these k and the rest as one.
    """
    if ids.shape[-1] == scores.shape[-1]:
        log_q = scores.log_softmax(-1).gather(-1, ids)
        return (p * (p.clamp(min=TINY).log() - log_q)).sum(-1).mean()
    found: Tensor = _TopAndRest.apply(scores, ids, p)
    return found.mean()


class _TopAndRest(torch.autograd.Function):  # type: ignore[misc]
    """The divergence at each position, with a custom gradient: passes over a large vocabulary are
    expensive, and this takes half as many."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        top = scores.gather(-1, ids)
        # In log space: 1 - sum(q) loses all precision where the student is as sure as the teacher.
        rest = scores.scatter(-1, ids, -torch.inf)
        highest = rest.amax(-1, keepdim=True)
        rest = rest.sub_(highest).exp_()
        total = rest.sum(-1, keepdim=True)
        log_rest = highest + total.log()
        log_all = torch.logaddexp(log_rest, top.logsumexp(-1, keepdim=True))
        log_q, log_q_rest = top - log_all, (log_rest - log_all).squeeze(-1)
        p_rest = (1 - p.sum(-1)).clamp(min=0.0)
        ctx.save_for_backward(rest, total, log_q, log_q_rest, ids, p, p_rest)
        cost = (p * (p.clamp(min=TINY).log() - log_q)).sum(-1)
        return cost + p_rest * (p_rest.clamp(min=TINY).log() - log_q_rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rest, total, log_q, log_q_rest, ids, p, p_rest = ctx.saved_tensors
        mass = p.sum(-1) + p_rest
        of_rest = grad * (mass * log_q_rest.exp() - p_rest)
        of_top = grad[..., None] * (mass[..., None] * log_q.exp() - p)
        each = rest * (of_rest[..., None] / total)
        return each.scatter_(-1, ids, of_top), None, None
