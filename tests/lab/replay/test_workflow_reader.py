"""Workflows as prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.replay import workflows
from lab.replay.trace import TraceError

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "workflows"


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(name: str, *agents: str, **more: Any) -> dict[str, Any]:
    steps = [{"agent": agent, "action": "say", "text": "x" * 400} for agent in agents]
    return {"workflow_id": name, "app": "a", "steps": steps, **more}


def test_prompts_share_per_agent_and_per_run(tmp_path: Path) -> None:
    """Across runs the system prompt; within a run everything that the agent saw before."""
    path = write(
        tmp_path / "w.jsonl",
        run("1", "user", "plan", "code", "plan"),
        run("2", "user", "plan"),
    )
    trace = workflows.read(path, 1 << 20)
    first, code, again, other = trace.calls
    assert [call.agent for call in trace.calls] == ["plan", "code", "plan", "plan"]
    assert again.path[: len(first.path)] == first.path
    assert set(code.path).isdisjoint(first.path)
    assert other.path[0] == first.path[0]
    assert other.path[1] != first.path[1]
    assert again.n_tokens - first.n_tokens == 2 * 101
    assert [call.session for call in trace.calls] == [0, 0, 0, 1]
    assert [call.ends for call in trace.calls] == [
        (),
        (),
        (again.path[-1], code.path[-1]),
        other.path[-1:],
    ]
    assert [call.time_s for call in trace.calls[:3]] == sorted(c.time_s for c in trace.calls[:3])
    assert len(workflows.read(path, 64, workflows_max=1).calls) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (run("1", "plan"), "occurs twice"),
        (run("2"), "0 steps"),
        ({"workflow_id": "2", "app": "a"}, "'steps' must be a list"),
        ({"workflow_id": "2", "steps": [{}]}, "'app' must be text"),
        ({"workflow_id": 5, "app": "a", "steps": []}, "'workflow_id' must be text"),
        (run("2", "p") | {"steps": [{"agent": "p"}]}, "'action' must be text"),
        (
            run("2") | {"steps": [{"agent": "p", "action": "b", "t": t} for t in (5, 4)]},
            "clock goes back",
        ),
    ],
)
def test_bad_workflows(tmp_path: Path, bad: Any, message: str) -> None:
    path = write(tmp_path / "w.jsonl", run("1", "plan"), bad)
    with pytest.raises(TraceError, match=f"w.jsonl:2.*{message}"):
        workflows.read(path, 64)


def test_no_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no step of a model"):
        workflows.read(write(tmp_path / "w.jsonl", run("1", "user", "tool:x")), 64)


@pytest.mark.skipif(not FOLDER.exists(), reason="the shared workflows are not here")
def test_shared_workflows() -> None:
    """The counts that their documentation gives; runs of one question stay in one group."""
    found = list(workflows.workflows(FOLDER / "who_and_when.jsonl.zst"))
    assert len(found) == 129
    assert sum(len(workflow.steps) for workflow in found) == 2868
    tau = list(workflows.workflows(FOLDER / "tau_bench_airline_gpt4o.jsonl.zst"))
    assert len({workflow.group for workflow in tau}) == 35
