"""Hierarchy only: what several running workflows share never leaves before what they do not; else LRU."""

from __future__ import annotations

from towerd.policy.base import Entry, Rank, Tree
from towerd.policy.predict.base import NoPrediction
from towerd.policy.workflow_tree import WorkflowTree


class Hierarchy(WorkflowTree):
    """Knows nothing of ends besides: a retired key is as good as any other."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree, NoPrediction())

    def _rank(self, entry: Entry) -> Rank:
        return float(len(self.users.get(entry.key, ())) > 1), entry.used
