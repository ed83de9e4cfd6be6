"""Workflows from trace files, for predictors: the names of steps and their texts.

Only the steps of a model count. A step's name is its agent if there are several agents, else its
action; its meaning covers all texts since the model's last step, its own last.
"""

from __future__ import annotations

from pathlib import Path

from lab.predict.runs import FinishedRun
from lab.predict.words import hash_text
from lab.replay.records import TraceRecord, lines
from lab.replay.trace import TraceError
from lab.replay.workflows import group_of, is_model
from towerd.sessions.trace_recorder import FORMAT as RECORDED

_STEPS_MAX = 10_000


def read_runs(path: Path) -> list[FinishedRun]:
    """The workflows of a file in the common format or recorded by the daemon. Raises TraceError for
    anything else and for a file without workflows."""
    records = list(lines(path))
    if records and records[0].value.get("format") == RECORDED:
        runs = _recorded(records[1:])
    else:
        runs = _common(records)
    if not runs:
        raise TraceError(f"{path.name} has no workflows with steps of agents")
    return runs


def _recorded(records: list[TraceRecord]) -> list[FinishedRun]:
    """The workflows of requests that name a workflow and an agent, in order of time."""
    paths: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda each: each.number("t")):
        workflow, agent = record.text("workflow", ""), record.text("agent", "")
        if workflow and agent:
            paths.setdefault(workflow, []).append(agent)
    return [FinishedRun(tuple(path[:_STEPS_MAX]), group=name) for name, path in paths.items()]


def _common(records: list[TraceRecord]) -> list[FinishedRun]:
    agents: dict[str, set[str]] = {}
    for record in records:
        for step in record.records("steps"):
            if is_model(step.text("agent")):
                agents.setdefault(_app(record), set()).add(step.text("agent"))
    runs = [_run(record, len(agents.get(_app(record), ())) > 1) for record in records]
    return [run for run in runs if run.steps]


def _app(record: TraceRecord) -> str:
    return record.text("app").split("_")[0]


def _run(record: TraceRecord, by_agent: bool) -> FinishedRun:
    steps = record.records("steps")
    if not 0 < len(steps) <= _STEPS_MAX:
        raise TraceError(f"{record.where}: {len(steps)} steps")
    names, meanings, said = [], [], list[str]()
    for step in steps:
        said.append(step.text("text", ""))
        if is_model(step.text("agent")):
            names.append(step.text("agent" if by_agent else "action"))
            meanings.append("\n".join(said))
            said = []
    group = group_of(record, record.text("app"), steps)
    return FinishedRun(tuple(names), tuple(hash_text(text) for text in meanings), group)
