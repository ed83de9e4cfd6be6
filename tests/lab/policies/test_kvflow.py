"""KVFlow: steps to execution on its own graph."""

from __future__ import annotations

from collections import deque

from planted import planted

from lab.policies.kvflow import FAR, KVFlow


def always(key: int) -> bool:
    return True


def test_kvflow_counts_steps_on_its_graph() -> None:
    """Against breadth-first search by hand; loops, ends and what cannot be reached."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    policy = planted(lambda tree: KVFlow(tree, graph))
    for key, agent in enumerate("abcd"):
        policy.insert(key, 10, 0.0, None)
        policy.stepped(key, float(key), "w", agent)
    policy.stepped(1, 5.0, "w", "b")
    want = {}
    for key, agent in enumerate("abcd"):
        queue, seen, want[key] = deque([("b", 0)]), set[str](), FAR
        while queue:
            at, n = queue.popleft()
            for after in graph[at] - seen:
                seen.add(after)
                queue.append((after, n + 1))
                want[key] = min(want[key], n + 1 if after == agent else FAR)
    assert {key: policy.steps_to_execution(key) for key in range(4)} == want
    assert policy.victims(40, always) == [0, 1, 3, 2]
    policy.workflow_ended("w", 6.0)
    assert policy.steps_to_execution(2) == FAR
    learned = planted(KVFlow)
    learned.insert(1, 10, 0.0, None)
    for agent in "aba":
        learned.stepped(1, 0.0, "w", agent)
    assert learned.steps_to_execution(1) == 1
