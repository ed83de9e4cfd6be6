"""`towerctl lab bench latem`: LATEM beside its paper's bounds, plain marking and LRU, as ratios to the
exact optimum."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.bench.latem.plot import plot
from lab.bench.plot import require
from lab.latem.algorithm import LatemCache
from lab.latem.cases import CASES, TOKEN_COST, Advice, LatemCase
from lab.latem.curves import Point, curve, robustness, total_cost
from lab.latem.optimum import Request, optimum_cost
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import show_table

TRUSTS = (0.05, 0.1, 0.3, 0.5, 0.9)
ERRORS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
Curves = dict[str, list[Point]]


async def run(model: Path | None, quick: bool, *, plot_path: Path | None = None) -> Report:
    """Run every case of `lab.latem.cases`."""
    if plot_path is not None:
        require(plot_path)
    n = 3 if quick else 20
    errors = (0.0, 0.5, 1.0) if quick else ERRORS
    curves = {name: curve(case, TRUSTS, errors, n) for name, case in CASES.items()}
    for name, points in curves.items():
        _show(name, CASES[name], points)
    report = Report("latem", "ratios to the optimum")
    report.figures = _findings(curves)
    report.details["curves"] = {
        name: [_row(point) for point in points] for name, points in curves.items()
    }
    if plot_path is not None:
        plot(plot_path, curves)
    return report


def _findings(curves: Curves) -> dict[str, Any]:
    """The paper's claims, as figures that say whether they hold."""
    perfect = {name: points[0] for name, points in curves.items()}
    damage = curves["in turn"][-1]
    figures: dict[str, Any] = {
        "robustness_bound_share_max": max(
            ratio / robustness(CASES[name], eps)
            for name, points in curves.items()
            for point in points
            for eps, ratio in point.repaired.items()
        ),
        "perfect_advice_ratio_max": max(max(p.repaired.values()) for p in perfect.values()),
        "perfect_advice_ratio_eps_0.9": max(p.repaired[0.9] for p in perfect.values()),
        "clean_messages_eps_0.01": curve(CASES["clean messages"], (0.01,), (0.0,), 5)[0].repaired[
            0.01
        ],
        "shared_pool_ratio": _against_shared_pool(),
        "by_tokens_printed": max(perfect["by tokens"].printed.values()),
        "by_tokens_repaired": max(perfect["by tokens"].repaired.values()),
    }
    figures |= {f"reversed_eps_{eps:g}": ratio for eps, ratio in damage.repaired.items()}
    adaptive = {"reversed_adaptive": damage.adaptive, "reversed_marking": damage.marking}
    return figures | adaptive | {"reversed_lru": damage.lru}


def _against_shared_pool() -> float:
    """A message whose k_t tokens are asked for in turn: cost with k_t' slots each, over that of
    an optimum that lets messages share all k_t."""
    requests: list[Request] = [(0, i % 8) for i in range(400)]
    advice = Advice(requests, 0.0, random.Random(0))
    paid = total_cost(LatemCache(4, 8, advice, token_cost=TOKEN_COST), requests, advice)
    return paid / optimum_cost(requests, 1, 8, TOKEN_COST)


def _show(name: str, case: LatemCase, points: Sequence[Point]) -> None:
    rows = [
        (
            name,
            f"{point.error:g}",
            *(f"{point.repaired[eps]:.2f}" for eps in TRUSTS),
            f"{point.adaptive:.2f}",
            f"{point.marking:.2f}",
            f"{point.lru:.2f}",
            f"{point.consistency:.1f}",
            f"{robustness(case, 0.9):.0f}",
        )
        for point in points
    ]
    heads = (*(f">eps {eps:g}" for eps in TRUSTS), ">adaptive", ">marking", ">LRU")
    show_table(("case", ">wrong", *heads, ">consistency", ">robustness 0.9"), rows)


def _row(point: Point) -> dict[str, Any]:
    return {
        "wrong": point.error,
        "printed": {f"{eps:g}": round(x, 3) for eps, x in point.printed.items()},
        "repaired": {f"{eps:g}": round(x, 3) for eps, x in point.repaired.items()},
        "adaptive": round(point.adaptive, 3),
        "marking": round(point.marking, 3),
        "lru": round(point.lru, 3),
        "consistency_bound": round(point.consistency, 3),
    }
