"""Tracks running workflows, their agents, and their ends.

A step belongs to the workflow that its request names (X-Towerd-Workflow), or else to the workflow
of its session. A new session joins the workflow whose texts its prompt quotes, or begins a new one.
Agents pass on what was said last: a prompt must quote one of its workflow's latest replies, too. What a
framework puts around every task is no reply; whoever quotes that alone would join the first workflow that
used it, and so would all that follow.
Agents are named (X-Towerd-Agent) or told apart by system prompt and tool definitions. Everything is
separated by tenant: whatever a client claims affects only its own segments.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from towerd.sessions.workflows.quotes import EVIDENCE_MIN, Quotes, sample
from towerd.store import Node
from towerd.tokens import Ids, common_prefix

WORKFLOWS_MAX = 512
"""Maximum number of running workflows of one tenant. Beyond it the least recently used ends."""
AGE_S_MAX = 3600.0
"""A workflow without a step for this long is over, even if its client did not end it."""
TOWERS_MAX = 256
AGENTS_MAX = 256
_PREFIX_TOKENS = 4096
_LATEST = 3
"""Replies of a workflow of which a prompt must quote one."""
_LATEST_HASHES = 64
"""Sampled hashes kept of each, the smallest: a sample of the whole."""
_LATEST_SHARE = 0.25
"""Share of those that it must quote."""
_PROMPT_SHARE = 0.5
"""Share of a prompt that must be quotes if the replies are too short to be recognised."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class WorkflowStep:
    """One recorded request of an agent. Times in Unix seconds, lengths in tokens."""

    scope: str
    session: str
    agent: str
    end: Node
    prompt: Ids
    reply: Ids
    arrived_s: float
    answered_s: float
    stop: str
    workflow: str | None = None
    """The client's name for it."""


@dataclass(slots=True)
class Workflow:
    """A running workflow. `towers`: session -> the last node of its tower."""

    scope: str
    id: str
    named: bool
    started_s: float
    last_s: float
    n_steps: int = 0
    agents: OrderedDict[str, None] = field(default_factory=OrderedDict)
    towers: OrderedDict[str, Node] = field(default_factory=OrderedDict)
    latest: deque[npt.NDArray[np.uint64]] = field(default_factory=lambda: deque(maxlen=_LATEST))
    """Sampled hashes of its latest replies."""

    @property
    def name(self) -> str:
        """A name that is unique across tenants."""
        return f"{self.scope}\n{self.id}"


@dataclass(slots=True)
class _Tenant:
    """The workflows of one tenant by id, least recently used first."""

    workflows: OrderedDict[str, Workflow] = field(default_factory=OrderedDict)
    of_session: OrderedDict[str, str] = field(default_factory=OrderedDict)
    first: OrderedDict[str, Ids] = field(default_factory=OrderedDict)
    """Agent -> the beginning of its first prompt. What later prompts share with it is no quote."""
    quotes: Quotes = field(default_factory=Quotes)
    n_begun: int = 0


class Tracker:
    """The running workflows of all tenants. Thread-safe; bounded per tenant."""

    def __init__(self) -> None:
        self.n_steps = self.n_recognised = self.n_ended = self.n_aged = 0
        self._tenants: dict[str, _Tenant] = {}
        self._lock = threading.Lock()

    def step(self, step: WorkflowStep) -> tuple[Workflow, list[Workflow]]:
        """The workflow that `step` belongs to, and the workflows that are now over because they
        were unused for too long or too many are running."""
        with self._lock:
            tenant = self._tenants.setdefault(step.scope, _Tenant())
            over = self._age(tenant, step.arrived_s)
            news = self._news(tenant, step)
            workflow = self._workflow(tenant, step, news)
            workflow.last_s = max(workflow.last_s, step.answered_s)
            workflow.n_steps += 1
            self.n_steps += 1
            _bounded(workflow.agents, step.agent, None, AGENTS_MAX)
            _bounded(workflow.towers, step.session, step.end, TOWERS_MAX)
            _bounded(tenant.of_session, step.session, workflow.id, WORKFLOWS_MAX * 4)
            tenant.quotes.add(news, workflow.id)
            tenant.quotes.add(step.reply, workflow.id)
            if len(hashes := sample(step.reply)) >= EVIDENCE_MIN:
                workflow.latest.append(np.array(hashes[:_LATEST_HASHES], np.uint64))
            tenant.workflows.move_to_end(workflow.id)
            while len(tenant.workflows) > WORKFLOWS_MAX:
                over.append(tenant.workflows.popitem(last=False)[1])
                self.n_aged += 1
            return workflow, over

    def end(self, scope: str, id: str) -> Workflow | None:
        """End a workflow on its client's request and return it; None if there is no such one."""
        with self._lock:
            tenant = self._tenants.get(scope)
            workflow = tenant.workflows.pop(id, None) if tenant is not None else None
            self.n_ended += workflow is not None
            return workflow

    def running(self, scope: str | None) -> list[Workflow]:
        """The running workflows of one tenant, or of all, most recently used first."""
        with self._lock:
            found = [
                workflow
                for name, tenant in self._tenants.items()
                if scope in (None, name)
                for workflow in tenant.workflows.values()
            ]
        return sorted(found, key=lambda workflow: -workflow.last_s)

    def stats(self) -> dict[str, int]:
        """Gauges and counters."""
        with self._lock:
            return {
                "workflows": sum(len(tenant.workflows) for tenant in self._tenants.values()),
                "steps": self.n_steps,
                "recognised": self.n_recognised,
                "ended": self.n_ended,
                "aged": self.n_aged,
            }

    def _news(self, tenant: _Tenant, step: WorkflowStep) -> Ids:
        """The part of the prompt after the beginning that it shares with its agent's first one."""
        first = tenant.first.get(step.agent)
        if first is None:
            _bounded(tenant.first, step.agent, step.prompt[:_PREFIX_TOKENS].copy(), WORKFLOWS_MAX)
            return step.prompt
        return step.prompt[common_prefix(first, step.prompt) :]

    def _workflow(self, tenant: _Tenant, step: WorkflowStep, news: Ids) -> Workflow:
        id = step.workflow or tenant.of_session.get(step.session)
        if id is None or (step.workflow is None and id not in tenant.workflows):
            id = _quoted(tenant, news)
            if id is not None:
                self.n_recognised += 1
            else:
                tenant.n_begun += 1
                id = f"~{tenant.n_begun}"
        found = tenant.workflows.get(id)
        if found is None:
            named = step.workflow is not None
            found = Workflow(step.scope, id, named, step.arrived_s, step.answered_s)
            tenant.workflows[id] = found
        return found

    def _age(self, tenant: _Tenant, now: float) -> list[Workflow]:
        over: list[Workflow] = []
        while tenant.workflows:
            oldest = next(iter(tenant.workflows.values()))
            if now - oldest.last_s <= AGE_S_MAX:
                break
            over.append(tenant.workflows.popitem(last=False)[1])
            self.n_aged += 1
        return over


def _quoted(tenant: _Tenant, news: Ids) -> str | None:
    """The running workflow to which a prompt with these news belongs, if any."""
    said = set(sample(news))
    for id, n_quoted in tenant.quotes.sources(said):
        workflow = tenant.workflows.get(id)
        if workflow is None:
            continue
        if not workflow.latest and n_quoted >= _PROMPT_SHARE * len(said):
            return id
        for reply in workflow.latest:
            if sum(h in said for h in reply.tolist()) >= _LATEST_SHARE * len(reply):
                return id
    return None


def _bounded(table: OrderedDict[str, V], key: str, value: V, most: int) -> None:
    """Insert or renew `key`; remove the oldest if there are more than `most`."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
