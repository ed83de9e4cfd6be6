"""`towerctl lab bench policy`: hit rates of the policies on recorded traces, beside the bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from lab.bench.plot import require
from lab.bench.policy import agent_workflows, costs
from lab.bench.policy.plot import plot
from lab.replay.cells import ReplayTask, TraceSource, Workers, workers
from lab.replay.compare import BASELINE, BOUND, Cell
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import show_table
from towerd.errors import ConfigError

POLICY = "foresight"
"""The policy that the targets apply to."""
CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SEGMENT_TOKENS = 16384
"""Tokens that are evicted as a whole. 2048 gives the same rates within 0.1 points, but takes five
times as long."""
_LEAST = {
    "worst_vs_lru_points": -0.5,
    "coding72_gap_2pct": 0.4,
    "coding72_gap_5pct": 0.3,
    "chat_gap_5pct_with_end": 0.9,
    "chat_gap_5pct": 0.15,
    "workflow_gap_10pct": 0.6,
    "predictor_ahead_points": 0.0,
}
_MOST = {
    "evict_ms_mean": 0.5,
    "evict_ms_p99": 0.5,
    "score_update_us_mean": 5.0,
    "score_update_us_p99": 5.0,
    "predict_ms_mean": 2.0,
    "predict_ms_p99": 2.0,
}
_USERS = (8, 24, 72)
_SEEDS = (0, 1, 2)
_CHAT = "mooncake_conversation"
_CODING = "coding-72"
_TEAMS = "workflows with hints"
_Cells = dict[str, list[Cell]]
_Shown = dict[str, tuple[TraceSource, Sequence[Cell]]]


async def run(
    model: Path | None,
    quick: bool,
    *,
    data: Path | None,
    policies: Sequence[str] = (),
    workflows: Path | None = None,
    plot_path: Path | None = None,
    jobs: int = 1,
) -> Report:
    """Replay everything in `data`, a folder with the traces, and in `workflows`, in `jobs`
    processes; see lab/replay/README.md. Figures whose folder is missing are not measured. Raises
    ConfigError if both are missing."""
    if data is None and workflows is None:
        raise ConfigError("Nothing to measure: name a folder with --data or --workflows.")
    if plot_path is not None:
        require(plot_path)
    names = tuple(dict.fromkeys((POLICY, *policies)))
    report = Report("policy", POLICY)
    shown: _Shown = {}
    with workers(jobs) as work:
        if data is not None:
            report.figures |= _of_traces(work, data, names, quick, shown)
        if workflows is not None:
            report.figures |= _of_workflows(work, workflows, names, quick, shown)
    if workflows is not None:
        found = dict(agent_workflows.predictors(workflows, quick=quick, jobs=jobs))
        agent_workflows.show(found)
        report.figures |= agent_workflows.figures(found)
        report.figures |= agent_workflows.recognised(workflows)
    if data is not None:
        report.figures |= costs.of_decisions(_chat(data).trace())
    if workflows is not None:
        report.figures |= costs.of_forecasts(agent_workflows.paths_of(workflows))
    if plot_path is not None:
        plotted = {k: v for k, v in shown.items() if k in (_CODING, _CHAT, _TEAMS)}
        plot(plot_path, {k: (of.trace(), v) for k, (of, v) in plotted.items()})
    _set_targets(report)
    return report


def _of_traces(
    work: Workers, data: Path, names: tuple[str, ...], quick: bool, shown: _Shown
) -> dict[str, Any]:
    """Hit rates on the traces in `data`."""
    plain = _replay(work, _sources(data, quick), names, quick, shown)
    ended = list(work([ReplayTask(_chat(data), 0.05, names, end_hints=True)]))
    _show(f"{_CHAT} with end signals", ended)
    return _figures(plain, ended)


def _replay(
    work: Workers,
    sources: Sequence[TraceSource],
    names: tuple[str, ...],
    quick: bool,
    shown: _Shown,
) -> _Cells:
    """The cells of every trace; those of the first seed are also entered in `shown`."""
    capacities = (0.02, 0.05) if quick else CAPACITIES
    cells = work([ReplayTask(source, c, names) for source in sources for c in capacities])
    plain: _Cells = {}
    for source in sources:
        found = list(islice(cells, len(capacities)))
        name = source.path.name.split(".")[0]
        if source.users:
            name = f"coding-{source.users}"
        plain.setdefault(name, []).extend(found)
        shown.setdefault(name, (source, found))
        _show(f"{name} #{source.seed}" if source.users else name, found)
    return plain


def _of_workflows(
    work: Workers, folder: Path, names: Sequence[str], quick: bool, shown: _Shown
) -> dict[str, Any]:
    """Hit rates on multi-agent workflows with hints."""
    source = agent_workflows.main_source(folder, SEGMENT_TOKENS)
    if source is None:
        return {}
    policies = tuple(dict.fromkeys((*names, *agent_workflows.POLICIES)))
    capacities = (0.05, 0.1) if quick else CAPACITIES
    cells = list(work([ReplayTask(source, c, policies, end_hints=True) for c in capacities]))
    shown[_TEAMS] = (source, cells)
    _show(_TEAMS, cells)
    figures: dict[str, Any] = {"workflow_gap_10pct": _gap(cells, 0.1)}
    for name in policies[1:]:
        figures[f"workflow_gap_10pct_{name}"] = _gap(cells, 0.1, name)
    return figures


def _sources(data: Path, quick: bool) -> list[TraceSource]:
    coding = data / "agentic_coding"
    found = [
        TraceSource(coding, SEGMENT_TOKENS, users, seed)
        for users in ((72,) if quick else _USERS)
        for seed in ((0,) if quick else _SEEDS)
    ]
    found.append(_chat(data))
    if not quick:
        found.append(TraceSource(_file(data, "mooncake_synthetic"), SEGMENT_TOKENS))
    return found


def _chat(data: Path) -> TraceSource:
    return TraceSource(_file(data, _CHAT), SEGMENT_TOKENS)


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


def _gap(cells: Sequence[Cell], capacity: float, policy: str = POLICY) -> float:
    """Mean share of the gap that is closed, over the seeds; 1 where there is no gap."""
    gaps = [cell.gap_closed(policy) for cell in cells if cell.capacity == capacity]
    return mean(1.0 if gap is None else gap for gap in gaps)


def _set_targets(report: Report) -> None:
    """Set the targets of the figures that were measured."""
    for key, least in _LEAST.items():
        if key in report.figures:
            report.target(key, least=least)
    for key, most in _MOST.items():
        if key in report.figures:
            report.target(key, most=most)
