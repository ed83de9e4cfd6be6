"""Perplexity of texts under live budgets, compared with that of the full cache."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lab.bench.longchat.reading import Advance, Reading, read
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.tokens import Ids

EQUAL_MEAN = "buzz_mean"
"""BUZZ with the budget under which its mean number of live tokens equals that of the others."""


class Ratio(NamedTuple):
    """The ratio of two perplexities of the same tokens."""

    value: float
    error: float
    """Standard error, from the spread of the single tokens."""


def ratio(found: Reading, full: Reading) -> Ratio:
    """The perplexity of `found` over that of `full`."""
    difference = found.surprises - full.surprises
    value = float(np.exp(difference.mean()))
    return Ratio(value, value * float(difference.std() / np.sqrt(len(difference))))


def live_by_token(live: LiveBudget, n: int) -> Ids:
    """int64[n]: how many tokens each of n sees under a budget, for policies whose number of kept
    tokens does not depend on attention."""
    live_set = BoundedSet.whole(live, 0, n + 1)
    seen = [np.empty(0, np.int64)]
    while live_set.n < n:
        if len(live_set.kept) >= live.tokens:
            live_set.drop(live_set.choose(None)[0, 0])
        n_new = min(live_set.room, n - live_set.n)
        seen.append(len(live_set.kept) + 1 + np.arange(n_new))
        live_set.extend(n_new)
    return np.concatenate(seen)


def budget_of_same_mean(budget: int, n: int) -> int:
    """The budget, at most n, under which BUZZ has as many live tokens on average as the policies
    that drop an eighth at a time. The cache sizes of its paper are means (section 4.2.1)."""
    wanted = live_by_token(LiveBudget("streaming", budget), n).mean()
    larger = range(budget, n)
    return budget + bisect.bisect_left(
        larger, wanted, key=lambda each: live_by_token(LiveBudget("buzz", each), n).mean()
    )


def plan(
    policies: Sequence[str], budgets: Sequence[int], n: int
) -> dict[int, dict[str, LiveBudget]]:
    """Budget -> name of a column -> the live budget for a text of n tokens."""
    found: dict[int, dict[str, LiveBudget]] = {}
    for budget in budgets:
        if budget >= n:
            continue
        found[budget] = {name: LiveBudget(name, budget) for name in policies}
        if "buzz" in policies and (wide := budget_of_same_mean(budget, n)) < n:
            found[budget][EQUAL_MEAN] = LiveBudget("buzz", wide)
    return found


async def measure(
    engine: EmbeddedEngine,
    texts: Mapping[str, Ids],
    policies: Sequence[str],
    budgets: Sequence[int],
    advance: Advance,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Perplexities with the full cache by text, and a row of ratios for each text and budget."""
    full_ppl: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, ids in texts.items():
        full = await read(engine, ids, LiveBudget(), advance)
        full_ppl[name] = full.perplexity
        for budget, lives in plan(policies, budgets, len(ids)).items():
            row: dict[str, Any] = {"text": name, "live": budget}
            errors: dict[str, float] = {}
            means: dict[str, float] = {}
            for column, live in lives.items():
                found = await read(engine, ids, live, advance)
                row[column], errors[column] = ratio(found, full)
                means[column] = float(found.live.mean())
            rows.append({**row, "errors": errors, "mean_live": means})
    return full_ppl, rows


def n_tokens(texts: Mapping[str, Ids], policies: Sequence[str], budgets: Sequence[int]) -> int:
    """The number of tokens that `measure` evaluates."""
    return sum(
        len(ids) * (1 + sum(map(len, plan(policies, budgets, len(ids)).values())))
        for ids in texts.values()
    )


def worst_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`buzz_vs_h2o_ppl` and the like: BUZZ over a rival, the worst of all texts and budgets, with
    the same maximum of live tokens and with the same mean."""
    found: dict[str, float] = {}
    for way in ("buzz", EQUAL_MEAN):
        for rival in ("h2o", "streaming"):
            ratios = [row[way] / row[rival] for row in rows if way in row and rival in row]
            if ratios:
                found[f"{way}_vs_{rival}_ppl"] = max(ratios)
    return found
