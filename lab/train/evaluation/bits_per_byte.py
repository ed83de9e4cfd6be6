"""Bits per byte of the evaluation text, by source, role and kind of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lab.train.data.corpus import DevText
from lab.train.data.form import ROLES
from lab.train.data.manifest import TextSource
from lab.train.model.network import NetworkShape, Weights, device_of, logits

F64 = npt.NDArray[np.float64]
WINDOWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class TextCost:
    """Bits spent on text, and its UTF-8 bytes; controls and role names cost bits but do not count
    as bytes."""

    bits: float
    n_bytes: float

    @property
    def per_byte(self) -> float:
        """Bits per byte; NaN if there is no text."""
        return self.bits / self.n_bytes if self.n_bytes else math.nan

    def __add__(self, other: TextCost) -> TextCost:
        return TextCost(self.bits + other.bits, self.n_bytes + other.n_bytes)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Costs by source and role."""

    costs: Mapping[str, Mapping[str, TextCost]]

    def total(self) -> TextCost:
        """The cost of all sources and roles."""
        return sum_costs(cost for roles in self.costs.values() for cost in roles.values())

    def of_source(self, name: str) -> TextCost:
        """The cost of all roles in one source."""
        return sum_costs(self.costs[name].values())

    def of_kind(self, kind: str, manifest: Mapping[str, TextSource]) -> TextCost:
        """The cost of all sources of a kind."""
        return sum_costs(self.of_source(n) for n in self.costs if manifest[n].kind == kind)

    def of_role(self, role: str) -> TextCost:
        """The cost of one role in all sources."""
        return sum_costs(roles[role] for roles in self.costs.values() if role in roles)

    def table(self, manifest: Mapping[str, TextSource]) -> dict[str, Any]:
        """Rounded bits per byte for the report."""
        kinds = sorted({manifest[name].kind for name in self.costs})
        roles = [role for role in ROLES if self.of_role(role).n_bytes]
        return {
            "all": round(self.total().per_byte, 4),
            "kinds": {kind: round(self.of_kind(kind, manifest).per_byte, 4) for kind in kinds},
            "roles": {role: round(self.of_role(role).per_byte, 4) for role in roles},
            "sources": {
                name: {"all": round(self.of_source(name).per_byte, 4)}
                | {role: round(cost.per_byte, 4) for role, cost in roles.items() if cost.n_bytes}
                for name, roles in self.costs.items()
            },
        }


def sum_costs(costs: Iterator[TextCost] | Any) -> TextCost:
    """Their sum."""
    return sum(costs, TextCost(0.0, 0.0))


def evaluate(
    weights: Weights, shape: NetworkShape, dev: Mapping[str, DevText], *, n_tokens_max: int
) -> Evaluation:
    """The cost of at most `n_tokens_max` tokens of each source; for a longer source, bytes count in
    proportion to the tokens of each role."""
    costs = {}
    for name, text in dev.items():
        n = min(len(text.ids), n_tokens_max)
        nats = token_costs(weights, shape, text.ids[:n])
        costs[name] = _by_role(nats, text, n)
    return Evaluation(costs)


def _by_role(nats: F64, text: DevText, n: int) -> dict[str, TextCost]:
    found = {}
    marks, all_marks = text.marks[1:n], text.marks[1:]
    for mark, role in enumerate(ROLES):
        n_all = int((all_marks == mark).sum())
        if n_all:
            share = int((marks == mark).sum()) / n_all
            bits = float(nats[marks == mark].sum()) / math.log(2)
            found[role] = TextCost(bits, text.bytes_of_role[mark] * share)
    return found


def token_costs(
    weights: Weights, shape: NetworkShape, ids: npt.NDArray[np.uint32], stride: int | None = None
) -> F64:
    """Nats of ids[1:], each given at least `n_ctx - stride` tokens before it if there are that many
    (`stride`: tokens by which the window advances; half a window by default)."""
    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(device_of(weights))
    stride = stride or max(1, shape.n_ctx // 2)
    costs = np.zeros(max(0, len(tokens) - 1))
    starts = list(range(0, max(1, len(tokens) - 1 - (shape.n_ctx - stride)), stride))
    for i in range(0, len(starts), WINDOWS_AT_ONCE):
        group = starts[i : i + WINDOWS_AT_ONCE]
        rows = [tokens[start : start + shape.n_ctx + 1] for start in group]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.no_grad():
            scores = logits(weights, shape, padded[:, :-1])
        nats = F.cross_entropy(scores.transpose(1, 2), padded[:, 1:], reduction="none").cpu()
        for row, start in enumerate(group):
            skipped = 0 if start == 0 else shape.n_ctx - stride
            n = len(rows[row]) - 1
            costs[start + skipped : start + n] = nats[row, skipped:n].double().numpy()
    return costs
