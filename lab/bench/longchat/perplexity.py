"""Perplexity of texts under live budgets, over that of the full cache.

A text is read in two ways: `prompt`, its beginning as a prompt, which is read in full and then thinned,
and the rest as the reply; `reply`, all of it as a reply, which the budget holds from its first tokens on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lab.bench.longchat.reading import Advance, Reading, read
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.service import Service
from towerd.tokens import Ids


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


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text to read: its first `n_prompt` tokens are the prompt, the others the reply."""

    name: str
    way: str
    """`prompt` or `reply`."""
    ids: Ids
    n_prompt: int

    @property
    def n_read(self) -> int:
        """Tokens of the reply."""
        return len(self.ids) - self.n_prompt

    def fits(self, live: LiveBudget) -> bool:
        """Whether the budget is less than its prompt, or than all of it if that is a reply."""
        return live.tokens < (self.n_prompt if self.way == "prompt" else len(self.ids))


async def measure(
    service: Service[EmbeddedEngine],
    texts: Sequence[ReadText],
    lives: Sequence[LiveBudget],
    advance: Advance,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Perplexities with the full cache by text and way, and a row for each text and budget. advance:
    called with the number of tokens of replies that were read."""
    full_ppl: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    token_bytes = service.engine.core.layout.token_bytes
    for text in texts:
        parts = text.ids[: text.n_prompt], text.ids[text.n_prompt :]
        full = await read(service, *parts, LiveBudget(), advance)
        full_ppl[f"{text.name} {text.way}"] = full.perplexity
        for live in filter(text.fits, lives):
            found = await read(service, *parts, live, advance)
            value, error = ratio(found, full)
            place = {"text": text.name, "way": text.way, **place_of(live)}
            live_n = {"peak": int(found.live.max()), "mean_live": float(found.live.mean())}
            sizes = {"peak_bytes": live_n["peak"] * token_bytes, "aside_bytes": found.aside_bytes}
            rows.append({**place, "ratio": value, "error": error, **live_n, **sizes})
    return full_ppl, rows


def place_of(live: LiveBudget) -> dict[str, Any]:
    """The columns that name a budget."""
    return {"policy": live.policy, "scope": live.scope, "live": live.tokens}


def n_read(texts: Sequence[ReadText], lives: Sequence[LiveBudget]) -> int:
    """The number of tokens of replies that `measure` reads."""
    return sum(text.n_read * (1 + sum(map(text.fits, lives))) for text in texts)


def mean_ratio(rows: Sequence[Mapping[str, Any]], way: str, live: LiveBudget) -> float | None:
    """The geometric mean of the ratios of all texts; None: there are none."""
    place = {"way": way, **place_of(live)}
    ratios = [row["ratio"] for row in rows if place.items() <= row.items()]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def worst_over(
    rows: Sequence[Mapping[str, Any]], policy: str, rival: str, way: str
) -> float | None:
    """The perplexity under a policy over that under a rival with the same scope and most live tokens, the
    worst of all texts and budgets; None: there are no two to compare."""
    keys = ("text", "way", "scope", "live")
    of_rival = {
        tuple(row[key] for key in keys): row["ratio"] for row in rows if row["policy"] == rival
    }
    found = [
        row["ratio"] / of_rival[place]
        for row in rows
        if row["policy"] == policy and row["way"] == way
        if (place := tuple(row[key] for key in keys)) in of_rival
    ]
    return max(found, default=None)
