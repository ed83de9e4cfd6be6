"""Policies side by side on one trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.policies.factory import make_policy
from lab.replay.belady import belady_hits
from lab.replay.simulate import ReplayOutcome, outcome_of, replay
from lab.replay.trace import Trace
from towerd.errors import ConfigError

BOUND = "belady"
BASELINE = "lru"


@dataclass(frozen=True, slots=True)
class Cell:
    """All outcomes at one capacity; LRU and the bound are always among them."""

    capacity: float
    n_blocks: int
    outcomes: dict[str, ReplayOutcome]

    def gap_closed(self, policy: str) -> float | None:
        """(policy - LRU) / (bound - LRU); None where LRU is within 0.1 points of the bound."""
        base = self.outcomes[BASELINE].hit_rate
        room = self.outcomes[BOUND].hit_rate - base
        return (self.outcomes[policy].hit_rate - base) / room if room >= 1e-3 else None

    def points_over_lru(self, policy: str) -> float:
        """Percentage points of token hit rate."""
        return 100 * (self.outcomes[policy].hit_rate - self.outcomes[BASELINE].hit_rate)


def compare(
    trace: Trace, policies: Sequence[str], capacities: Sequence[float], *, end_hints: bool = False
) -> Iterator[Cell]:
    """A cell per capacity, given as a share of the distinct blocks. Raises ConfigError for an
    unknown policy."""
    for policy in policies:
        make_policy(policy, trace)
    for capacity in capacities:
        n_blocks = int(capacity * trace.n_distinct_blocks)
        outcomes = {
            name: replay(trace, make_policy(name, trace), n_blocks, end_hints=end_hints)
            for name in dict.fromkeys((BASELINE, *policies))
        }
        outcomes[BOUND] = outcome_of(trace, belady_hits(trace, n_blocks))
        yield Cell(capacity, n_blocks, outcomes)


def parse_capacities(text: str) -> list[float]:
    """`1%,5%,0.2` -> shares. Raises ConfigError."""
    shares: list[float] = []
    for word in text.split(","):
        bare = word.strip().removesuffix("%")
        try:
            share = float(bare) / (100 if word.strip().endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise ConfigError(f"capacity {word.strip()!r} is not a share such as 5%")
        shares.append(share)
    return shares
