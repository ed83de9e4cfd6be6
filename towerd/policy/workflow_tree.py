"""What workflow policies share: who used which key as which agent, and which runs are over."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from towerd.policy.base import Key
from towerd.policy.tree import Entry, TreePolicy

RUNS_MAX = 4096
"""Workflows that may go on; beyond that the one without a step for longest counts as over."""
RUN_IDLE_S = 3600.0
"""A workflow without a step for this long counts as over."""
PATH_MAX = 64
"""Last steps of a workflow that predictors see."""
AGENTS_MAX = 256
"""Agents of a workflow that are told apart."""


class Run:
    """One workflow that may go on."""

    __slots__ = ("agents", "forecast", "gains", "keys", "path", "stepped_s")

    def __init__(self) -> None:
        self.path: list[str] = []
        self.agents: set[str] = set()
        self.keys: set[Key] = set()
        """What its steps used and is in the tier."""
        self.stepped_s = 0.0
        self.forecast: Any = ()
        self.gains: dict[str, float] = {}
        """Per agent: what a key that it uses gains from this workflow."""


class WorkflowTree(TreePolicy):
    """Keeps `users`: per key and workflow the agents that used it (PBKV's A_w(c))."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: OrderedDict[str, Run] = OrderedDict()
        self.users: dict[Key, dict[str, set[str]]] = {}
        self._n_over: dict[Key, int] = {}
        """Workflows that used a key and are over."""

    # ---- what a subclass says ---------------------------------------------------------------

    def _on_step(self, run: Run) -> None:
        """`run` has taken a step, or has been resumed."""

    def _on_over(self, run: Run) -> None:
        """`run` is over."""

    # ---- events -----------------------------------------------------------------------------

    def stepped(self, key: Key, now: float, workflow: str, agent: str) -> None:
        """See Policy.stepped."""
        self._tick(now)
        run = self.runs.pop(workflow, None) or Run()
        self.runs[workflow] = run
        run.stepped_s = self._now
        if agent not in run.agents and len(run.agents) >= AGENTS_MAX:
            agent = ""
        run.agents.add(agent)
        run.path.append(agent)
        del run.path[:-PATH_MAX]
        at: Key | None = key
        while at is not None and (entry := self._entries.get(at)) is not None:
            self.users.setdefault(at, {}).setdefault(workflow, set()).add(agent)
            run.keys.add(at)
            at = entry.parent
        self._on_step(run)
        self._push_all(run)
        self._age()

    def workflow_ended(self, workflow: str, now: float) -> None:
        """See Policy.workflow_ended."""
        self._tick(now)
        run = self.runs.pop(workflow, None)
        if run is None:
            return
        self._on_over(run)
        for key in run.keys:
            del self.users[key][workflow]
            self._n_over[key] = self._n_over.get(key, 0) + 1
        self._push_all(run)

    def is_retired(self, key: Key) -> bool:
        """Whether workflows used it and all of them are over (PBKV, section 4.2.1)."""
        return not self.users.get(key) and self._n_over.get(key, 0) > 0

    def _on_remove(self, entry: Entry) -> None:
        for workflow in self.users.pop(entry.key, ()):
            self.runs[workflow].keys.discard(entry.key)
        self._n_over.pop(entry.key, None)

    def _on_split(self, lower: Entry, upper: Entry) -> None:
        users = self.users.get(lower.key, {})
        self.users[upper.key] = {workflow: set(agents) for workflow, agents in users.items()}
        for workflow in users:
            self.runs[workflow].keys.add(upper.key)
        if lower.key in self._n_over:
            self._n_over[upper.key] = self._n_over[lower.key]

    def _push_all(self, run: Run) -> None:
        for key in run.keys:
            if key not in self._n_children:
                self._push(key)

    def _age(self) -> None:
        """Workflows that never end are over some day."""
        while self.runs:
            name, run = next(iter(self.runs.items()))
            if len(self.runs) <= RUNS_MAX and self._now - run.stepped_s <= RUN_IDLE_S:
                break
            self.workflow_ended(name, self._now)
