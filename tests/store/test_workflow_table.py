"""Workflows in the catalog: what went in comes out, in order, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from towerd.store import Store
from towerd.store.sessions import workflows as module
from towerd.store.sessions.workflows import Invocation, WorkflowTable

STEP = Invocation("local", "w", True, 1.0, "planner", "s1", 7, 100, 20, 1.5, 2.5, "tool_use")


def test_history(store: Store) -> None:
    table = WorkflowTable(store.state)
    other = replace(STEP, scope="b")
    later = replace(STEP, agent="coder", arrived_s=3.0)
    again = replace(STEP, started_s=50.0)
    table.add([STEP, other])
    table.add([later])
    table.add([again])
    assert table.history("local") == [[STEP, later], [again]]
    assert table.history("b") == [[other]]
    assert table.history() == [[STEP, later], [other], [again]]
    table.end("local", "w", 60.0)
    ended = store.state.catalog.rows("SELECT scope, ended FROM workflows ORDER BY pk")
    assert ended == [("local", 60.0), ("b", None), ("local", 60.0)]


def test_bounds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest workflows go with all their steps, then the oldest steps."""
    monkeypatch.setattr(module, "WORKFLOWS_MAX", 10)
    table = WorkflowTable(store.state)
    for i in range(65):  # what is beyond the bounds is pruned every 64 batches
        table.add([replace(STEP, workflow=f"w{i}")] * 3)
    assert [steps[0].workflow for steps in table.history()] == [f"w{i}" for i in range(55, 65)]
    assert store.state.catalog.rows("SELECT count(*) FROM invocations") == [(30,)]
    monkeypatch.setattr(module, "INVOCATIONS_MAX", 7)
    for _ in range(64):
        table.add([STEP])
    assert sum(map(len, table.history())) == 7
    store.check_integrity(keys=True)
