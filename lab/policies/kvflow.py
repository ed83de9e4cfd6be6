"""KVFlow: evict the key whose next use is the most steps away on a static graph of agents.

A key's distance is the least number of steps, over the workflows that used it, from the running
agent to one that used the key. The graph is given, or the union of the transitions seen
so far. A key that no running workflow can reach is evicted first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from towerd.policy.base import Entry, Key, Rank, Tree
from towerd.policy.predict.base import NoPrediction
from towerd.policy.workflow_tree import AGENTS_MAX, WorkflowRun, WorkflowTree

FAR = 1 << 20
"""Distance of keys that cannot be reached."""


class KVFlow(WorkflowTree):
    """graph: the agents that may follow each agent; without one, edges are added as they are
    seen."""

    def __init__(self, tree: Tree, graph: Mapping[str, set[str]] | None = None) -> None:
        super().__init__(tree, NoPrediction())
        self._is_given = graph is not None
        self._edges: dict[str, set[str]] = {a: set(bs) for a, bs in (graph or {}).items()}
        self._from: dict[str, dict[str, int]] = {}

    def steps_to_execution(self, key: Key) -> int:
        """The distance of a key; FAR if no running workflow can use it again."""
        least = FAR
        for workflow, agents in self.users.get(key, {}).items():
            steps = self._steps(self.runs[workflow].path[-1])
            least = min([least, *(steps.get(agent, FAR) for agent in agents)])
        return least

    def _rank(self, entry: Entry) -> Rank:
        return -self.steps_to_execution(entry.key), entry.used

    def _on_step(self, run: WorkflowRun) -> None:
        if self._is_given or len(run.path) < 2:
            return
        before, agent = run.path[-2:]
        after = self._edges.setdefault(before, set())
        if agent not in after and len(self._edges) <= AGENTS_MAX:
            after.add(agent)
            self._from.clear()

    def _steps(self, start: str) -> dict[str, int]:
        """Least steps from `start` to each agent; to itself: around a loop."""
        found = self._from.get(start)
        if found is not None:
            return found
        steps: dict[str, int] = {}
        queue = deque([(start, 0)])
        while queue:
            agent, n = queue.popleft()
            for after in self._edges.get(agent, ()):
                if after not in steps:
                    steps[after] = n + 1
                    queue.append((after, n + 1))
        self._from[start] = steps
        return steps
