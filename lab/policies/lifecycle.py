"""Lifecycle only: what no running workflow uses any more leaves first, then LRU (PBKV, section 4.2.1)."""

from __future__ import annotations

from towerd.policy.base import Entry, Rank, Tree
from towerd.policy.predict.base import NoPrediction
from towerd.policy.workflow_tree import WorkflowTree


class Lifecycle(WorkflowTree):
    """Among retired keys, those that the fewest workflows used leave first."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree, NoPrediction())

    def _rank(self, entry: Entry) -> Rank:
        if self.is_retired(entry.key):
            return -1.0 / (1 + self._n_over[entry.key]), entry.used
        return 0.0, entry.used
