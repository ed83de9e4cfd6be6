"""A basis learned on the windows of a text, with the weight of each group of planes measured.

An error of the same size costs more in some planes than in others: at SmolLM2 a hundred times as much in the values
of the first five layers as in those of the last five. Each group is coded coarsely by itself, all others
native, and what that costs by its squared error is the square of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis
from towerd.codec.rows.learn import Eigh, Rounding, groups_of, learn
from towerd.codec.rows.plain import flattened
from towerd.engine.embedded.calibration.measure import Measurer
from towerd.kernels import dispatch
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows, join
from towerd.tiers.shrink import SINKS, TAIL

COARSE_STEP = 1.5
"""Of a group's root mean variance: coarse enough to be told from the model's noise."""
COST_MIN = 3e-4
"""What no group costs less than, in nats: less cannot be told from noise on so few tokens."""


def learned(
    measurer: Measurer,
    rope: Rope,
    codings: Mapping[str, Rounding],
    n_layers: int,
    n_continuations: int,
    row_identity: bytes,
    eigh: Eigh = np.linalg.eigh,
    pause: Callable[[], object] = lambda: None,
    rot_k: bool = False,
) -> Basis:
    """The basis of groups of `n_layers`, learned from the rows of all windows of a prepared Measurer and
    weighted by what errors cost on the first `n_continuations`: weighted numbers have a variance of 1 on average,
    which the steps of `codings` are shares of. eigh, pause, rot_k: see `learn`. Raises CodecError."""
    samples = [rows.slice(SINKS, rows.p1) for rows in windows_of(measurer)]
    groups = groups_of(measurer.layout, n_layers)
    how = _How(row_identity, eigh, pause, rot_k)
    plain = _coarse(samples, rope, groups, how)
    costs = _costs(measurer, rope, plain, n_continuations, pause)
    weights = [0.0] * len(measurer.layout.planes)
    for planes, cost in zip(groups, costs, strict=True):
        for plane in planes:
            weights[plane] = math.sqrt(cost)
    flat = how.flattened(samples, rope)
    squares = [weight**2 * how.variance(flat, i) for i, weight in enumerate(weights)]
    scale = 1 / math.sqrt(float(np.mean(squares)))
    weights = [weight * scale for weight in weights]
    return how.learn(samples, rope, codings, groups, weights)


@dataclass(frozen=True, slots=True)
class _How:
    """See `learn`."""

    row_identity: bytes
    eigh: Eigh
    pause: Callable[[], object]
    rot_k: bool

    def learn(
        self,
        samples: Sequence[KVRows],
        rope: Rope,
        codings: Mapping[str, Rounding],
        groups: Sequence[tuple[int, ...]],
        weights: Sequence[float],
    ) -> Basis:
        return learn(
            samples,
            rope,
            codings,
            row_identity=self.row_identity,
            groups=groups,
            weights=weights,
            eigh=self.eigh,
            pause=self.pause,
            rot_k=self.rot_k,
        )

    def flattened(self, samples: Sequence[KVRows], rope: Rope) -> list[KVRows]:
        """The samples' plain rows."""
        found = []
        for rows in samples:
            self.pause()
            found.append(flattened(rows, rope, rot_k=self.rot_k))
        return found

    def variance(self, samples: Sequence[KVRows], plane: int) -> float:
        """The mean variance of the numbers of a plane."""
        self.pause()
        return float(np.mean([floats_of(rows, plane).var(axis=0).mean() for rows in samples]))


def windows_of(measurer: Measurer) -> list[KVRows]:
    """The longest native rows of each window."""
    longest = {c.window: c for c in sorted(measurer.plan.continuations, key=lambda c: c.p)}
    return [measurer.rows(longest[window]) for window in sorted(longest)]


def _coarse(
    samples: Sequence[KVRows],
    rope: Rope,
    groups: Sequence[tuple[int, ...]],
    how: _How,
) -> Basis:
    """A basis whose planes are all scaled to a variance of 1, with one coarse coding."""
    flat = how.flattened(samples, rope)
    layout = samples[0].layout
    weights = [0.0] * len(layout.planes)
    for planes in groups:
        variance = np.mean([how.variance(flat, plane) for plane in planes])
        for plane in planes:
            weights[plane] = 1 / math.sqrt(max(float(variance), 1e-12))
    rounding = {"coarse": Rounding(COARSE_STEP)}
    return how.learn(samples, rope, rounding, groups, weights)


def floats_of(rows: KVRows, plane: int) -> np.ndarray:
    """float32[n, elements] of a plane."""
    name = rows.layout.planes[plane].format.name
    return dispatch.transcoded(rows.plane(plane), name, "f32").view(np.float32)


def _costs(
    measurer: Measurer, rope: Rope, basis: Basis, n: int, pause: Callable[[], object]
) -> list[float]:
    """What each group's coarse coding costs, in nats for the mean square of its error."""
    found: list[list[float]] = [[] for _ in basis.groups]
    parts: list[KVRows] = []

    def only(i: int, rows: KVRows) -> list[KVRows]:
        if i == 0:  # on each continuation the groups take turns, and all are coded at once
            parts[:] = sandwiched(rows, basis, "coarse", rope, pause)
        mixed, native = parts[1], rows.slice(parts[1].p0, parts[1].p1)
        planes = list(native.planes())
        for plane in basis.groups[i].planes:
            error = floats_of(mixed, plane) - floats_of(native, plane)
            found[i].append(float((error**2).mean()))
            planes[plane] = mixed.plane(plane)
        n_layer = basis.layout.n_layer
        only_these = replace(native, k=tuple(planes[:n_layer]), v=tuple(planes[n_layer:]))
        return [parts[0], only_these, parts[2]]

    codings = [lambda rows, i=i: only(i, rows) for i in range(len(basis.groups))]
    costs = measurer.costs_of(codings, n)
    return [
        max(cost.excess, COST_MIN) / float(np.mean(errors))
        for cost, errors in zip(costs, found, strict=True)
    ]


def sandwiched(
    rows: KVRows,
    basis: Basis,
    coding: str,
    rope: Rope,
    pause: Callable[[], object] | None = None,
) -> list[KVRows]:
    """Native rows of positions [0, n) with all between the first SINKS and the last TAIL written in a coding
    and read again. pause: called every few milliseconds of one core; None: all cores are used at once"""
    first, last = SINKS, len(rows) - TAIL
    inner, head, tail = (
        rows.slice(first, last).token_major(),
        rows.slice(0, first),
        rows.slice(last, len(rows)),
    )
    if pause is None:
        data = coded.encode(inner, basis, coding, rope)
        return [head, coded.parse(data).read(first, last, basis, rope), tail]
    parsed = coded.parse(coded.encode(inner, basis, coding, rope, n_threads=1, pause=pause))
    read = []
    for at in range(first, last, coded.PAGE_ROWS):
        pause()
        end = min(at + coded.PAGE_ROWS, last)
        read.append(parsed.read(at, end, basis, rope, n_threads=1))
    return [head, join(read), tail]
