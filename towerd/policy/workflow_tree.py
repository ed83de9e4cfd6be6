"""The shared base of workflow policies: which agents used which keys, and which runs ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import islice, takewhile
from typing import Any, ClassVar

from towerd.policy.base import Entry, Evictable, Frees, Key, Learning, Policy, Tree
from towerd.policy.bases import Bases
from towerd.policy.predict.base import END, Forecast, Predictor
from towerd.policy.predict.tenants import MARK, tenant_in

RUNS_MAX = 4096
"""Workflows that may continue; beyond that the one idle for longest counts as over."""
RUN_IDLE_S = 3600.0
"""A workflow without a step for this long counts as over."""
PATH_MAX = 64
"""The last steps of a workflow that predictors see."""
AGENTS_MAX = 256
"""Agents told apart within a workflow."""
_NEW_GAP_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step that a workflow may take next, by an agent whose prompts are known."""

    workflow: str
    n_steps: int
    """How many steps it has taken, so that a forecast is told from the one before."""
    last: Key
    """Where the agent's last tower ended."""
    end: Key
    """`last` or a key above it: up to there its next prompt is expected to be the same."""
    chance: float


@dataclass(slots=True)
class WorkflowRun:
    """One workflow that may continue."""

    path: list[str] = field(default_factory=list)
    n_steps: int = 0
    agents: set[str] = field(default_factory=set)
    keys: set[Key] = field(default_factory=set)
    """Keys that its steps used, as far as `WorkflowTree.users` knows them."""
    ends: dict[str, Key] = field(default_factory=dict)
    """By agent: where its last prompt ended, in the tier or not."""
    stepped_s: float = 0.0
    forecast: Forecast = ()
    likely: tuple[str, float] = ("", 0.0)
    """The likeliest agent of the next step, and its chance."""
    gains: dict[str, float] = field(default_factory=dict)
    """By agent: what this workflow adds to the score of a key that the agent uses."""

    def copy(self) -> WorkflowRun:
        """An independent copy."""
        path, agents, keys, ends = self.path[:], set(self.agents), set(self.keys), dict(self.ends)
        return replace(self, path=path, agents=agents, keys=keys, ends=ends)


class WorkflowTree(Policy):
    """Keeps `users`: per key and workflow the agents that used it (PBKV's A_w(c)). What is known of bases, and of
    keys that several workflows used, outlives their eviction: rows that come back are as much in use as before."""

    teaches: ClassVar[bool] = True
    """Whether its predictor learns from its events."""

    def __init__(self, tree: Tree, predictor: Predictor) -> None:
        super().__init__(tree)
        self.predictor = predictor
        self.step_s = 1.0
        """Recent mean duration of a step of a workflow."""
        self.runs: OrderedDict[str, WorkflowRun] = OrderedDict()
        self.users: dict[Key, dict[str, set[str]]] = {}
        self._n_over: dict[Key, int] = {}
        """By key: how many workflows that used it are over."""
        self._bases = Bases()
        self._n_changed: OrderedDict[str, int] = OrderedDict()
        """By agent: how many of the last nodes of a tower its next prompt did not begin with."""
        self._n_changed_anew: OrderedDict[str, int] = OrderedDict()
        """The same for its first prompt in a workflow, after one in another workflow."""
        self._last: OrderedDict[str, Key] = OrderedDict()
        """By agent: where its last tower ended, in whatever workflow."""
        self._followed: OrderedDict[tuple[str, str], None] = OrderedDict()
        """The agents that followed each other in some workflow."""

    # ---- overridden by subclasses -----------------------------------------------------------

    def _on_step(self, run: WorkflowRun) -> None:
        """`run` has taken a step and has a new forecast."""

    # ---- events -----------------------------------------------------------------------------

    def stepped(
        self, key: Key, now: float, workflow: str, agent: str, base: Key | None = None
    ) -> None:
        self._tick(now)
        self._age()
        run = self.runs.pop(workflow, None) or WorkflowRun()
        self.runs[workflow] = run
        if run.path:
            self.step_s += _NEW_GAP_WEIGHT * (self._now - run.stepped_s - self.step_s)
        run.stepped_s = self._now
        if agent not in run.agents and len(run.agents) >= AGENTS_MAX:
            agent = tenant_in([agent]) + MARK
        run.agents.add(agent)
        if self.teaches and agent in run.ends:
            _remember(self._n_changed, agent, self._count_changed(run.ends[agent], key))
        elif self.teaches and agent in self._last:
            _remember(self._n_changed_anew, agent, self._count_changed(self._last[agent], key))
        _remember(self._last, agent, key)
        if run.path:
            _remember(self._followed, (run.path[-1], agent), None)
        run.ends[agent] = key
        run.n_steps += 1
        run.path.append(agent)
        del run.path[:-PATH_MAX]
        if base is not None:
            for old in self._bases.used(self._up(base), tenant_in([agent]), self._now):
                if old not in self._entries and not self._outlives_eviction(old):
                    self._forget_uses(old)
        for at in self._up(key):
            if at in self._entries or self._outlives_eviction(at):
                self.users.setdefault(at, {}).setdefault(workflow, set()).add(agent)
                run.keys.add(at)
        if self.teaches:
            self.predictor.observe(run.path)
        run.forecast = self.predictor.forecast(run.path)
        agents = (
            {name: p for name, p in run.forecast[0].items() if name != END} if run.forecast else {}
        )
        run.likely = max(agents.items(), key=lambda pair: pair[1], default=("", 0.0))
        self._on_step(run)
        self._push_all(run)
        self._age()

    def workflow_ended(self, workflow: str, now: float) -> None:
        self._tick(now)
        run = self.runs.pop(workflow, None)
        if run is None:
            return
        if self.teaches:
            self.predictor.observe([*run.path, END])
        for key in run.keys:
            del self.users[key][workflow]
            if not self.users[key]:
                del self.users[key]
            self._n_over[key] = self._n_over.get(key, 0) + 1
        self._push_all(run)

    def copy_from(self, other: Policy) -> None:
        """See Policy.copy_from. Copies what is known of workflows, too."""
        super().copy_from(other)
        if not isinstance(other, WorkflowTree):
            return
        self.step_s = other.step_s
        self.users = {
            key: {workflow: set(agents) for workflow, agents in users.items()}
            for key, users in other.users.items()
        }
        self._n_over, self._bases = dict(other._n_over), other._bases.copy()
        self.runs = OrderedDict((name, run.copy()) for name, run in other.runs.items())

    def learned(self) -> Mapping[str, Any]:
        """See Learning.learned: of the predictor."""
        return self.predictor.learned() if isinstance(self.predictor, Learning) else {}

    def recall(self, learned: Mapping[str, Any]) -> None:
        if isinstance(self.predictor, Learning):
            self.predictor.recall(learned)

    def next_steps(
        self, most: int, chance_min: float, leaves_out: Callable[[str, int], bool]
    ) -> list[NextStep]:
        """The likeliest next steps of all workflows, the likeliest first, each at least as likely as
        `chance_min`, as far as it is known what the agent's prompt begins with, and it has followed the last one
        before: a forecast that no such step stands behind is a guess.

        leaves_out: called with a workflow and how many steps it has taken"""
        found = [
            NextStep(name, run.n_steps, *expected, run.likely[1])
            for name, run in self.runs.items()
            if run.likely[1] >= chance_min
            and not leaves_out(name, run.n_steps)
            and (run.path[-1], run.likely[0]) in self._followed
            and (expected := self._expected(run, run.likely[0])) is not None
        ]
        return nlargest(most, found, key=lambda step: step.chance)

    def n_steps(self, workflow: str) -> int:
        """How many steps a workflow has taken; 0 if it is over, or unknown."""
        run = self.runs.get(workflow)
        return 0 if run is None else run.n_steps

    def _expected(self, run: WorkflowRun, agent: str) -> tuple[Key, Key] | None:
        """Where the agent's last tower ended, and up to which key its next prompt is the same, if it changes as
        it did before. If that is not known, its prompt stays, and the reply does not. None: nothing
        stays."""
        last = run.ends.get(agent)
        n_changed = self._n_changed.get(agent)
        if last is None:
            last, n_changed = self._last.get(agent), self._n_changed_anew.get(agent)
            if n_changed is None:
                return None  # no two of its first prompts are known
        if last is None:
            return None
        if n_changed is None:
            return last, self.tree.parent(last) or last
        end = next(islice(self._up(last), n_changed, None), None)
        return None if end is None else (last, end)

    def _count_changed(self, before: Key, after: Key) -> int:
        """How many of the last nodes of the tower that ends with `before` the one that ends with `after` does
        not have."""
        path = set(self._up(after))
        return sum(1 for _ in takewhile(lambda key: key not in path, self._up(before)))

    def _up(self, key: Key) -> Iterator[Key]:
        """`key` and all keys above it."""
        at: Key | None = key
        while at is not None:
            yield at
            at = self.tree.parent(at)

    def victims(self, bytes_needed: int, is_evictable: Evictable, frees: Frees = None) -> list[Key]:
        """See Policy.victims. What is idle for too long is over, also if no workflow takes a step meanwhile."""
        self._age()
        for key in self._bases.look(self.size_of, self.n_workflows, self._now, self.nbytes):
            self._push(key)
        found = super().victims(bytes_needed, is_evictable, frees)
        self._bases.evicted(sum(self._entries[key].nbytes for key in found))
        return found

    def n_workflows(self, key: Key) -> int:
        """How many workflows have used it."""
        return len(self.users.get(key, ())) + self._n_over.get(key, 0)

    def is_retired(self, key: Key) -> bool:
        """Whether workflows used it and all of them are over (PBKV, section 4.2.1). What an agent's prompts begin
        with never is: its next workflow begins with it."""
        return key in self._n_over and key not in self.users and not self.is_kept_base(key)

    def is_kept_base(self, key: Key) -> bool:
        """Whether it stays though no running workflow uses it, because agents' prompts begin with it."""
        return self._bases.is_kept(key)

    def forget(self, key: Key) -> None:
        super().forget(key)
        self._forget_uses(key)
        self._bases.forget(key)

    def _on_remove(self, entry: Entry) -> None:
        super()._on_remove(entry)
        if not self._outlives_eviction(entry.key):
            self._forget_uses(entry.key)

    def _outlives_eviction(self, key: Key) -> bool:
        """Whether what is known of a key stays when its rows leave."""
        return key in self._bases or self.n_workflows(key) > 1

    def _forget_uses(self, key: Key) -> None:
        for workflow in self.users.pop(key, ()):
            self.runs[workflow].keys.discard(key)
        self._n_over.pop(key, None)

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        if users := self.users.get(lower):
            self.users[upper] = {workflow: set(agents) for workflow, agents in users.items()}
            for workflow in users:
                self.runs[workflow].keys.add(upper)
        if lower in self._n_over:
            self._n_over[upper] = self._n_over[lower]
        self._bases.split(lower, upper)
        super().split(lower, upper, upper_nbytes, now)

    def _push_all(self, run: WorkflowRun) -> None:
        few, many = sorted((run.keys, self._leaves.keys()), key=len)
        for key in few:
            if key in many:
                self._push(key)

    def _age(self) -> None:
        """End workflows that have been idle for too long, or that exceed RUNS_MAX."""
        while self.runs:
            name, run = next(iter(self.runs.items()))
            if len(self.runs) <= RUNS_MAX and self._now - run.stepped_s <= RUN_IDLE_S:
                break
            self.workflow_ended(name, self._now)


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Note a value, within a bound."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > RUNS_MAX:
        known.popitem(last=False)
