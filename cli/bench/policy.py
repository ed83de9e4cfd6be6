"""`towerctl bench policy`: hit rates of the policies on recorded traces, beside the bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from towerd.cli.bench.report import Report
from towerd.cli.output import show_table
from towerd.errors import ConfigError
from towerd.policy import Key, make_policy
from towerd.policy.tree import TreePolicy
from towerd.replay.compare import BASELINE, BOUND, Cell, compare
from towerd.replay.interleave import interleave
from towerd.replay.load import load
from towerd.replay.simulate import replay
from towerd.replay.trace import Trace

POLICY = "foresight"
"""The policy that the targets are about."""
CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SEGMENT_TOKENS = 2048
_USERS = (8, 24, 72)
_SEEDS = (0, 1, 2)
_CHAT = "mooncake_conversation"
_CODING = "coding-72"
_ABSENT = "workflow_gap_10pct, s1, s2, s3, anticipation_ratio, anticipation_wasted, ttft_ratio"
_Cells = dict[str, list[Cell]]


async def run(
    model: Path | None, quick: bool, *, data: Path, policies: Sequence[str] = ()
) -> Report:
    """Replay everything in `data`, a folder with the traces; see README.md of towerd/replay."""
    names = tuple(dict.fromkeys((POLICY, *policies)))
    capacities = (0.02, 0.05) if quick else CAPACITIES
    plain: _Cells = {}
    for trace in _traces(data, quick):
        found = list(compare(trace, names, capacities))
        plain.setdefault(trace.name, []).extend(found)
        _show(trace.name, found)
    chat = load(_file(data, _CHAT), SEGMENT_TOKENS)
    ended = list(compare(chat, names, (0.05,), end_hints=True))
    _show(f"{_CHAT} with end signals", ended)
    report = Report("policy", POLICY)
    report.figures = _figures(plain, ended) | _costs(chat)
    report.figures["not_measured"] = _ABSENT
    _set_targets(report)
    return report


def _traces(data: Path, quick: bool) -> Iterator[Trace]:
    coding = load(data / "agentic_coding", SEGMENT_TOKENS)
    for users in (72,) if quick else _USERS:
        for seed in (0,) if quick else _SEEDS:
            yield interleave(coding, users, seed)
    yield load(_file(data, _CHAT), SEGMENT_TOKENS)
    if not quick:
        yield load(_file(data, "mooncake_synthetic"), SEGMENT_TOKENS)


def _file(data: Path, name: str) -> Path:
    for suffix in (".jsonl.zst", ".jsonl"):
        if (path := data / (name + suffix)).exists():
            return path
    raise ConfigError(f"{data} has no {name}.jsonl.zst")


def _show(title: str, cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        for name, outcome in cell.outcomes.items():
            gap = cell.gap_closed(name)
            moved = outcome.n_moved_blocks * outcome.block_tokens
            rows.append(
                (
                    title,
                    f"{100 * cell.capacity:g} %",
                    name,
                    f"{100 * outcome.hit_rate:.2f}",
                    "" if gap is None else f"{gap:.3f}",
                    f"{outcome.n_prefilled_tokens:,}",
                    f"{moved:,}",
                )
            )
    heads = ("trace", "capacity", "policy", ">hit %", ">gap", ">prefilled tokens")
    show_table((*heads, ">tokens moved"), rows)


def _figures(plain: _Cells, ended: Sequence[Cell]) -> dict[str, Any]:
    cells = [cell for found in plain.values() for cell in found]
    figures = {
        "worst_vs_lru_points": min(cell.points_over_lru(POLICY) for cell in cells),
        "coding72_gap_2pct": _gap(plain[_CODING], 0.02),
        "coding72_gap_5pct": _gap(plain[_CODING], 0.05),
        "chat_gap_5pct": _gap(plain[_CHAT], 0.05),
        "chat_gap_5pct_with_end": _gap(ended, 0.05),
    }
    for share in (0.02, 0.05):
        for name in (BASELINE, POLICY, BOUND):
            rates = [c.outcomes[name].hit_rate for c in plain[_CODING] if c.capacity == share]
            figures[f"coding72_hit_{round(100 * share)}pct_{name}"] = mean(rates)
    return figures


def _gap(cells: Sequence[Cell], capacity: float) -> float:
    """Mean over the seeds; where there is no gap, nothing was left open."""
    gaps = [cell.gap_closed(POLICY) for cell in cells if cell.capacity == capacity]
    return mean(1.0 if gap is None else gap for gap in gaps)


def _set_targets(report: Report) -> None:
    report.target("worst_vs_lru_points", least=-0.5)
    report.target("coding72_gap_2pct", least=0.4)
    report.target("coding72_gap_5pct", least=0.3)
    report.target("chat_gap_5pct_with_end", least=0.9)
    report.target("chat_gap_5pct", least=0.15)
    report.target("evict_ms_mean", most=0.5)


class _Timed:
    """A policy's `victims`, timed."""

    def __init__(self, policy: TreePolicy) -> None:
        self._victims = policy.victims
        self.times_ms: list[float] = []

    def victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        start = time.perf_counter()
        chosen = self._victims(bytes_needed, is_evictable)
        self.times_ms.append(1000 * (time.perf_counter() - start))
        return chosen


def _costs(trace: Trace) -> dict[str, float]:
    """What one eviction costs, in a replay of its own at 5 %."""
    policy = make_policy(POLICY)
    assert isinstance(policy, TreePolicy)
    timed = _Timed(policy)
    policy.victims = timed.victims  # type: ignore[method-assign]
    replay(trace, policy, int(0.05 * trace.n_distinct_blocks))
    return {
        "evict_ms_mean": mean(timed.times_ms),
        "evict_ms_p99": quantiles(timed.times_ms, n=100)[98],
    }
