"""Agent runs in the common format, expanded to the prompts of their agents.

    {"workflow_id", "app", "steps": [{"agent", "action", "text"?, "cut"?, "t"?}, ...]}

Every step of an agent that is not a person or a tool is a request: the system prompt of its
(app, agent), then everything said in the workflow so far. So prompts share a prefix per agent
across workflows, and per (workflow, agent) over time. Texts are not tokenized: four characters
count as a token, and the length of a system prompt follows from its name (see `_system_tokens`).
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.replay.records import TraceRecord, lines
from lab.replay.trace import Call, Trace, TraceError
from lab.replay.tree import BlockPrompt, TreeBuilder

BLOCK_TOKENS = 16
CHARS_PER_TOKEN = 4
_SYSTEM_TOKENS = (400, 2000)
_TOKENS_PER_S = 40.0
_PAUSE_S = 1.0
_STEPS_MAX = 10_000
_Row = tuple[float, int, int, int, str, int, tuple[int, ...]]
"""(time, prompt, tokens, session, agent, tokens of its base, prompts that end) of one request."""
_NO_MODEL = ("user", "human", "system", "env", "Computer_terminal")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of a workflow; n_tokens: length of the text said, called or returned."""

    agent: str
    action: str
    n_tokens: int
    time_s: float


@dataclass(frozen=True, slots=True)
class RecordedWorkflow:
    """One run. group: equal for runs of the same task."""

    workflow_id: str
    app: str
    group: str
    steps: tuple[RecordedStep, ...]


def workflows(path: Path) -> Iterator[RecordedWorkflow]:
    """The runs of a file. Raises TraceError for bad records, times that go back, and runs without
    steps or with more than any real run has."""
    seen: set[str] = set()
    for record in lines(path):
        name = record.text("workflow_id")
        if name in seen:
            raise TraceError(f"{record.where}: workflow_id {name!r} occurs twice")
        seen.add(name)
        steps = record.records("steps")
        if not 0 < len(steps) <= _STEPS_MAX:
            raise TraceError(f"{record.where}: {len(steps)} steps")
        app = record.text("app")
        yield RecordedWorkflow(name, app, group_of(record, app, steps), tuple(_steps(steps)))


def read(path: Path, segment_tokens: int, workflows_max: int | None = None) -> Trace:
    """The prompts of all runs, each run from time 0; see `interleave`. Raises TraceError."""
    expander = _Expander()
    calls: list[_Row] = []
    for number, workflow in enumerate(workflows(path)):
        if workflows_max is not None and number >= workflows_max:
            break
        calls += expander.expand(number, workflow)
    if not calls:
        raise TraceError(f"{path.name}: no step of a model")
    parents, lengths, paths = expander.tree.finish(max(1, segment_tokens // BLOCK_TOKENS))
    name = path.name.split(".")[0]
    trace = Trace(name, BLOCK_TOKENS, parents, lengths, is_woven=False)
    for time_s, prompt, n_tokens, session, agent, n_base, ended in calls:
        ends = tuple(paths[index][-1] for index in ended)
        call = Call(time_s, paths[prompt], n_tokens, session, "", 0.0, agent, ends, n_base)
        trace.calls.append(call)
    return trace


def is_model(agent: str) -> bool:
    """Whether the steps of an agent come from a language model."""
    return agent not in _NO_MODEL and not agent.startswith("tool:")


class _Expander:
    """Numbers the blocks of all prompts."""

    def __init__(self) -> None:
        self.tree = TreeBuilder()
        self._numbers: dict[Hashable, int] = {}

    def expand(self, number: int, workflow: RecordedWorkflow) -> list[_Row]:
        """The requests of a run; its last one ends the prompts of all its agents."""
        calls: list[_Row] = []
        last: dict[str, BlockPrompt] = {}
        n_history = 0
        for step in workflow.steps:
            if is_model(step.agent):
                n_base = _system_tokens(workflow.app, step.agent)
                n_tokens = n_base + n_history
                prompt = self._prompt(number, workflow.app, step.agent, n_tokens, last)
                last[step.agent] = prompt
                row = step.time_s, prompt.index, n_tokens, number, step.agent, n_base
                calls.append((*row, ()))
            n_history += step.n_tokens
        if calls:
            calls[-1] = (*calls[-1][:6], tuple(prompt.index for prompt in last.values()))
        return calls

    def _prompt(
        self, number: int, app: str, agent: str, n_tokens: int, last: dict[str, BlockPrompt]
    ) -> BlockPrompt:
        """The full blocks of a prompt: those of the system prompt, then the run's own."""
        before = last.get(agent)
        n_kept = len(before.blocks) if before is not None else 0
        n_system = _system_tokens(app, agent) // BLOCK_TOKENS
        new: list[int] = []
        for i in range(n_kept, n_tokens // BLOCK_TOKENS):
            key = (app, agent, i) if i < n_system else (number, agent, i)
            new.append(self._numbers.setdefault(key, len(self._numbers)))
        return self.tree.add(before, n_kept, new)


def _system_tokens(app: str, agent: str) -> int:
    """Length of an agent's system prompt: a function of the name, spread evenly over the lengths
    that frameworks ship."""
    least, most = _SYSTEM_TOKENS
    return least + zlib.crc32(f"{app}/{agent}".encode()) % (most - least)


def _steps(records: list[TraceRecord]) -> Iterator[RecordedStep]:
    """Steps with times: those of the file, or else the time that generating the text would take."""
    at_s = 0.0
    for record in records:
        n_chars = record.integer("cut", len(record.text("text", "")))
        n_tokens = n_chars // CHARS_PER_TOKEN + 1
        time_s = record.number("t", at_s)
        if time_s < at_s and "t" in record.value:
            raise TraceError(f"{record.where}: the clock goes back")
        yield RecordedStep(record.text("agent"), record.text("action"), n_tokens, time_s)
        timed = record.value.get("t") is not None
        at_s = time_s if timed else at_s + _PAUSE_S + n_tokens / _TOKENS_PER_S


def group_of(record: TraceRecord, app: str, steps: list[TraceRecord]) -> str:
    """The group of runs of one task, which must not be split between training and test."""
    meta = record.value.get("meta")
    found = meta if isinstance(meta, dict) else {}
    for name in ("question_id", "task_id", "scenario"):
        if name in found and not app.startswith("intercode"):
            return f"{app.split('_')[0]}/{found[name]}"
    return steps[0].text("text", record.text("workflow_id"))
