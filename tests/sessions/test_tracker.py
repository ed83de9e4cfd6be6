"""Workflows: named, recognised, ended, aged, flooded; one tenant never touches another's."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from towerd.sessions.workflows import Tracker, WorkflowStep
from towerd.sessions.workflows import tracker as module
from towerd.store import Node

END = Node(1, None, "local", 0, b"")
_RNG = np.random.default_rng(3)


def text(n: int = 200) -> Any:
    return _RNG.integers(0, 32000, n).astype(np.int32)


def step(session: str, agent: str, prompt: Any, **values: Any) -> WorkflowStep:
    fixed: dict[str, Any] = {
        "scope": "local",
        "end": END,
        "reply": text(),
        "arrived_s": 1.0,
        "answered_s": 2.0,
        "stop": "end_turn",
    }
    return WorkflowStep(session=session, agent=agent, prompt=prompt, **(fixed | values))


def test_a_name_decides() -> None:
    tracker = Tracker()
    first, _ = tracker.step(step("s1", "planner", text(), workflow="w"))
    second, _ = tracker.step(step("s2", "coder", text(), workflow="w"))
    assert first is second
    assert (first.id, first.named, first.n_steps) == ("w", True, 2)
    assert list(first.agents) == ["planner", "coder"]
    assert list(first.towers) == ["s1", "s2"]


def test_without_names_quotations_decide() -> None:
    """A new agent whose prompt holds what another one said is of its workflow; the same system
    prompt alone is no evidence."""
    tracker = Tracker()
    system, other_system = text(300), text(300)
    said = text(150)
    first, _ = tracker.step(step("s1", "planner", np.concatenate([system, text()]), reply=said))
    hands_on = np.concatenate([other_system, said[20:120], text(30)])
    second, _ = tracker.step(step("s2", "coder", hands_on))
    assert second is first
    third, _ = tracker.step(step("s3", "planner", np.concatenate([system, text()])))
    assert third is not first
    assert tracker.n_recognised == 1
    again, _ = tracker.step(step("s2", "coder", np.concatenate([hands_on, text()])))
    assert again is first
    assert not first.named
    assert first.id.startswith("~")


def test_the_same_system_prompt_in_two_first_tasks() -> None:
    """Two tasks of one agent begin alike, and stay two workflows."""
    tracker = Tracker()
    system = text(2000)
    a, _ = tracker.step(step("a", "solo", np.concatenate([system, text(50)])))
    b, _ = tracker.step(step("b", "solo", np.concatenate([system, text(50)])))
    assert a is not b


def test_an_endless_workflow_ages_out() -> None:
    tracker = Tracker()
    old, _ = tracker.step(step("s1", "a", text(), workflow="old"))
    for i in range(1, 5):
        tracker.step(
            step("s1", "a", text(), workflow="old", arrived_s=900.0 * i, answered_s=900.0 * i)
        )
    late = 3600.0 + module.AGE_S_MAX + 1.0
    _, over = tracker.step(step("s2", "a", text(), workflow="new", arrived_s=late))
    assert over == [old]
    assert [w.id for w in tracker.running(None)] == ["new"]
    assert tracker.stats()["aged"] == 1


def test_a_flood_of_names_pushes_out_its_own_tenant_only() -> None:
    tracker = Tracker()
    mine, _ = tracker.step(step("s", "a", text(), workflow="mine", scope="me"))
    pushed = 0
    for i in range(3 * module.WORKFLOWS_MAX):
        _, over = tracker.step(step(f"s{i}", f"a{i}", text(40), workflow=f"w{i}", scope="them"))
        assert all(each.scope == "them" for each in over)
        pushed += len(over)
    assert len(tracker.running("them")) == module.WORKFLOWS_MAX
    assert pushed == 2 * module.WORKFLOWS_MAX
    assert tracker.running("me") == [mine]


def test_a_flood_of_names_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions, agents and workflows that never come back are forgotten."""
    monkeypatch.setattr(module, "WORKFLOWS_MAX", 20)
    monkeypatch.setattr("towerd.sessions.workflows.quotes.HASHES_MAX", 100)
    tracker, n = Tracker(), 1000
    for i in range(3 * n):
        if i == 2 * n:
            tracemalloc.start()
        tracker.step(step(f"s{i}", f"a{i}", text(40), workflow=f"w{i}"))
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes < 200 * n


def test_one_workflow_with_many_parts_is_bounded() -> None:
    tracker = Tracker()
    for i in range(1000):
        tracker.step(step(f"s{i}", f"a{i}", text(20), workflow="w"))
    (workflow,) = tracker.running("local")
    assert len(workflow.towers) == module.TOWERS_MAX
    assert len(workflow.agents) == module.AGENTS_MAX


def test_only_its_owner_ends_it() -> None:
    tracker = Tracker()
    mine, _ = tracker.step(step("s", "a", text(), workflow="w", scope="me"))
    assert tracker.end("them", "w") is None
    assert tracker.end("me", "w") is mine
    assert tracker.end("me", "w") is None
    assert mine.name != tracker.step(step("s", "a", text(), workflow="w", scope="them"))[0].name
    # a session whose workflow is over begins another when it continues
    goes_on, _ = tracker.step(step("s", "a", text(), scope="me"))
    assert goes_on is not mine


def test_a_clock_that_goes_back_is_tolerated() -> None:
    tracker = Tracker()
    workflow, _ = tracker.step(step("s", "a", text(), arrived_s=1e6, answered_s=1e6))
    again, over = tracker.step(step("s", "a", text(), arrived_s=5.0, answered_s=4.0))
    assert (again, over) == (workflow, [])
    assert again.last_s == 1e6
