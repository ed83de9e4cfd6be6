"""What is compared: policies, with and without hints, and memories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from towerd.settings.config import defaults

BASELINE = "lru"
RIVALS = ("lifecycle", "hierarchy", "pbkv")
SHARES = (0.1, 0.3, 0.5)
CONCURRENCIES = (4, 16)
CONCURRENCIES_QUICK = (8,)


@dataclass(frozen=True, slots=True)
class WorkflowCell:
    """What is served, and with which memory. share: of all distinct tokens, what RAM and disk each hold;
    concurrency: workflows that run at a time."""

    policy: str
    hints: bool = True
    prefetch: bool = False
    share: float = SHARES[0]
    concurrency: int = CONCURRENCIES[-1]

    @property
    def name(self) -> str:
        """For a row of the table."""
        hints = "" if self.hints else ", no hints"
        prefetch = ", prefetch" if self.prefetch else ""
        return f"{self.policy}{hints}{prefetch}, {100 * self.share:g} %, {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Compared:
    """The cells from which the figures with targets come, at one memory and concurrency."""

    policy: str
    share: float
    concurrency: int

    @property
    def lru(self) -> WorkflowCell:
        """Without hints, of which LRU makes no use."""
        return WorkflowCell(BASELINE, hints=False, share=self.share, concurrency=self.concurrency)

    @property
    def hinted(self) -> WorkflowCell:
        return replace(self.lru, policy=self.policy, hints=True)

    @property
    def unhinted(self) -> WorkflowCell:
        return replace(self.lru, policy=self.policy)

    @property
    def prefetched(self) -> WorkflowCell:
        return replace(self.hinted, prefetch=True)

    @property
    def lied(self) -> WorkflowCell:
        """With a predictor that is wrong, which the default notices."""
        return replace(self.hinted, policy="foresight-lied")

    def cells(self) -> list[WorkflowCell]:
        return [self.lru, self.hinted, self.unhinted, self.prefetched, self.lied]


def chosen(
    policies: Sequence[str], shares: Sequence[float], concurrencies: Sequence[int], quick: bool
) -> tuple[Compared, list[WorkflowCell]]:
    """What is compared at the least memory and most concurrency, and all cells. policies: besides the default
    and LRU; empty: all of them, or none if `quick`."""
    policy = str(defaults()["policy"])
    compared = Compared(policy, min(shares), max(concurrencies))
    cells = compared.cells()
    if not quick:
        # Theorem 5.1: the closer forecasts are to the truth, the less an eviction costs
        told = ("pbkv-told", "pbkv-lied", "foresight-told")
        cells += [replace(compared.hinted, policy=each) for each in told]
    others = policies or (() if quick else RIVALS)
    for share in shares:
        for concurrency in concurrencies:
            at = Compared(policy, share, concurrency)
            cells += [at.lru, at.hinted, at.unhinted]
            cells += [replace(at.hinted, policy=each) for each in others]
    return compared, list(dict.fromkeys(_sound(cells)))


def _sound(cells: Iterable[WorkflowCell]) -> Iterable[WorkflowCell]:
    """LRU makes no use of hints: one cell for both."""
    return (replace(cell, hints=cell.hints and cell.policy != BASELINE) for cell in cells)
