"""Multi-agent workflows: apps, their agents and call graphs, and the walks that workflows are.

A walk is dynamic: the next agent follows from the last two with some chance, so that there are loops,
retries and an end that nobody announces. Every agent's prompt begins with its base, the app's own text
and its system prompt with its tools, then the task and all that was said so far, in words of the model's
vocabulary. Lengths are in words, which are tokens of a random vocabulary and nearly so of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Rng = np.random.Generator
Message: TypeAlias = dict[str, str]
STEPS_MAX = 12
_LIKELY = (0.8, 0.13, 0.07)
"""Chances of the first, second and third choice after two agents."""
_P_END = (0.02, 0.6)
"""Chance of the end after any agent, and after the last one of the app, which reviews."""


@dataclass(frozen=True, slots=True)
class WorkflowLoad:
    """The size of the load; lengths in words."""

    apps: int = 2
    agents: int = 4
    requests: int = 280
    """At least; the last workflow is not cut off."""
    warm_requests: int = 100
    """Workflows that begin with one of these only fill the tiers and train the policies."""
    app_words: int = 60
    base_words: int = 200
    """An agent's system prompt, besides the app's."""
    task_words: int = 30
    result_words: int = 20
    """What a tool returns after each step."""
    reply_tokens: int = 24
    """Enough to recognise a reply in a later prompt."""
    p_again: float = 0.45
    """Chance that an agent reads what its tool said and acts again, before it hands over: in recorded runs of
    several agents 0.34 (tau-bench) and 0.51 (who_and_when)."""


@dataclass(frozen=True, slots=True)
class App:
    """bases: the system prompt of each agent; then the choices after each pair of agents."""

    name: str
    bases: tuple[str, ...]
    choices: dict[tuple[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WorkflowStepLoad:
    """One request. result: what a tool says afterwards; pause: until the next step, 1 on average."""

    agent: int
    result: str
    pause: float


@dataclass(slots=True)
class WorkflowWalk:
    """One workflow."""

    name: str
    app: App
    task: str
    is_measured: bool = True
    steps: list[WorkflowStepLoad] = field(default_factory=list)

    def agent_name(self, agent: int) -> str:
        return f"{self.app.name}-agent-{agent}"

    @property
    def agents(self) -> list[str]:
        """The agents of all steps."""
        return [self.agent_name(step.agent) for step in self.steps]


@dataclass(slots=True)
class Transcript:
    """What was said in a workflow, by whom: an agent, or None for the task and the tools."""

    lines: list[tuple[int | None, str]]

    def messages(self, app: App, agent: int) -> list[Message]:
        """The chat as `agent` is sent it: its own words are the assistant's."""
        said = [
            {"role": "assistant" if by == agent else "user", "content": text}
            for by, text in self.lines
        ]
        return [{"role": "system", "content": app.bases[agent]}, *said]


def walks(load: WorkflowLoad, words: Sequence[str], seed: int) -> list[WorkflowWalk]:
    """The workflows of a run, in the order in which they begin."""
    rng = np.random.default_rng(seed)
    apps = [
        _app(load, words, np.random.default_rng([seed, n]), f"app-{n}") for n in range(load.apps)
    ]
    weights = 1.0 / np.arange(1, load.apps + 1)
    found: list[WorkflowWalk] = []
    n_steps = 0
    while n_steps < load.requests:
        app = apps[int(rng.choice(load.apps, p=weights / weights.sum()))]
        task = _text(rng, words, load.task_words)
        walk = WorkflowWalk(f"s{seed}-w{len(found)}", app, task, n_steps >= load.warm_requests)
        before, at = -1, 0
        for _ in range(STEPS_MAX):
            result = _text(rng, words, load.result_words)
            walk.steps.append(WorkflowStepLoad(at, result, float(rng.exponential())))
            if rng.random() < _P_END[at == load.agents - 1]:
                break
            if rng.random() >= load.p_again:
                before, at = at, _next(rng, app, before, at)
        found.append(walk)
        n_steps += len(walk.steps)
    return found


def distinct_tokens(load: WorkflowLoad, all_walks: Sequence[WorkflowWalk], overhead: float) -> int:
    """Tokens that an unlimited store would hold in the end. overhead: tokens that a message takes besides
    its words."""
    bases = {(walk.app.name, step.agent) for walk in all_walks for step in walk.steps}
    apps = {walk.app.name for walk in all_walks}
    total = float(len(apps) * load.app_words + len(bases) * (load.base_words + overhead))
    for walk in all_walks:
        last = {step.agent: n for n, step in enumerate(walk.steps)}
        said = load.result_words + load.reply_tokens + 2 * overhead
        for n in last.values():
            total += load.task_words + overhead + n * said + load.reply_tokens + overhead
    return round(total)


def least_evaluated(load: WorkflowLoad, walk: WorkflowWalk, overhead: float) -> list[float]:
    """Tokens that each step evaluates if nothing is ever evicted and its agent's base is known: what was said
    since its agent's last step."""
    said = load.result_words + load.reply_tokens + 2 * overhead
    last: dict[int, int] = {}
    found = list[float]()
    for n, step in enumerate(walk.steps):
        before = last.get(step.agent)
        if before is None:
            found.append(load.task_words + overhead + n * said)
        else:
            found.append((n - before) * said - load.reply_tokens)
        last[step.agent] = n
    return found


def prompt_tokens(load: WorkflowLoad, all_walks: Sequence[WorkflowWalk], overhead: float) -> float:
    """Mean length of a prompt behind its base."""
    said = load.result_words + load.reply_tokens + 2 * overhead
    lengths = [
        load.task_words + overhead + n * said for w in all_walks for n in range(len(w.steps))
    ]
    return float(np.mean(lengths))


def _app(load: WorkflowLoad, words: Sequence[str], rng: Rng, name: str) -> App:
    shared = _text(rng, words, load.app_words)
    bases = tuple(f"{shared} {_text(rng, words, load.base_words)}" for _ in range(load.agents))
    choices: dict[tuple[int, int], tuple[int, ...]] = {}
    for before in range(-1, load.agents):
        for at in range(load.agents):
            others = [agent for agent in range(load.agents) if agent != at]
            choices[before, at] = tuple(int(x) for x in rng.permutation(others)[: len(_LIKELY)])
    return App(name, bases, choices)


def _next(rng: Rng, app: App, before: int, at: int) -> int:
    draw = float(rng.random())
    for chance, agent in zip(_LIKELY, app.choices[before, at], strict=False):
        if draw < chance:
            return agent
        draw -= chance
    return at


def _text(rng: Rng, words: Sequence[str], n: int) -> str:
    return " ".join(words[i] for i in rng.integers(0, len(words), n))
