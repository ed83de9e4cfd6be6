"""Agents at a real daemon: hints, workflows, reasons, and a trace that replays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import requests
from click.testing import CliRunner
from daemon import Daemon

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.cli.main import towerctl
from towerd.tokens import common_prefix

MakeDaemon = Callable[..., Daemon]
SYSTEM = "You tell stories about animals. You are kind, and you never stop before the end."


def chat(daemon: Daemon, text: str, system: str | None = SYSTEM, **headers: str) -> str:
    """One reply; headers by the last word of their names."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    named = {f"X-Towerd-{name.capitalize()}": value for name, value in headers.items()}
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    reply = daemon.post("/v1/chat/completions", body, headers=named)
    content = reply["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def workflows(daemon: Daemon, **kwargs: Any) -> dict[str, dict[str, Any]]:
    found = daemon.get("/towerd/v1/workflows", **kwargs)["workflows"]
    return {each["id"]: each for each in found}


def test_a_named_workflow(make_daemon: MakeDaemon) -> None:
    """Two agents of one workflow; its end, once; its steps stay in the catalog."""
    with make_daemon("-t", "1") as daemon:
        chat(daemon, "A cat.", workflow="w1", agent="teller", session="s1")
        chat(daemon, "A dog.", workflow="w1", agent="critic", session="s2")
        chat(daemon, "A cow.", workflow="w2", agent="teller", session="s3")
        found = workflows(daemon)
        assert found["w1"]["agents"] == ["teller", "critic"]
        assert found["w1"]["sessions"] == ["s1", "s2"]
        assert found["w1"]["named"]
        daemon.post("/towerd/v1/workflows/w1/end", {})
        assert set(workflows(daemon)) == {"w2"}
        error = daemon.post("/towerd/v1/workflows/w1/end", {}, status=404)["error"]
        assert error["message"] == "there is no running workflow 'w1'"
        metrics = requests.get(daemon.url + "/metrics", timeout=30).text
        assert "towerd_workflow_steps_total 3.0" in metrics
        assert daemon.stop() == 0
        with daemon.stored() as store:
            rows = store.state.catalog.rows(
                "SELECT w.id, w.ended IS NOT NULL, i.agent, i.stop FROM invocations i"
                " JOIN workflows w ON w.pk = i.workflow ORDER BY i.id"
            )
        assert [row[:3] for row in rows] == [
            ("w1", 1, "teller"),
            ("w1", 1, "critic"),
            ("w2", 0, "teller"),
        ]
        assert {row[3] for row in rows} <= {"max_tokens", "end_turn"}


def test_a_base_outlives_the_only_workflow_that_used_it(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """What was said leaves first, but not what the agent's next prompt begins with. The model's template
    names speakers."""
    make_random_gguf(model := tmp_path / "tiny.gguf", PRESETS["tiny"])
    with make_daemon("-t", "1", "-m", str(model)) as daemon:
        chat(daemon, "A cat.", workflow="w1", agent="teller")
        daemon.post("/towerd/v1/workflows/w1/end", {})
        prompts = [
            daemon.post("/apply-template", {"messages": [*of(SYSTEM), *of(said, "user")]})["prompt"]
            for said in ("yes", "no")
        ]
        ids = [
            daemon.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
            for text in prompts
        ]
        n_base = common_prefix(*(np.array(each["tokens"], np.int32) for each in ids))
        segments = daemon.get("/towerd/v1/segments")["segments"]
        scores = {
            each["p1"]: daemon.get(f"/towerd/v1/segments/{each['id']}/why")["why"]["hot"]["score"]
            for each in segments
        }
        assert scores[n_base] >= 0.0
        assert all(score < 0.0 for end, score in scores.items() if end > n_base)


def of(text: str, role: str = "system") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def test_hints_that_cannot_be(make_daemon: MakeDaemon) -> None:
    with make_daemon("-t", "1") as daemon:
        for header in ("X-Towerd-Workflow", "X-Towerd-Agent", "X-Towerd-Session"):
            reply = daemon.post(
                "/completion", {"prompt": "a", "n_predict": 1}, 400, headers={header: "x" * 129}
            )
            assert header in reply["error"]["message"]
        assert workflows(daemon) == {}


def test_agents_without_hints(make_daemon: MakeDaemon) -> None:
    """Told apart by their system prompts; plain completions and bare chats belong to no agent."""
    with make_daemon("-t", "1") as daemon:
        chat(daemon, "A cat.", session="a")
        chat(daemon, "A dog.", system="You are another one.", session="b")
        chat(daemon, "A dog.", system=None)
        daemon.complete("Once", 4)
        found = list(workflows(daemon).values())
        assert len(found) == 2
        assert all(not each["named"] for each in found)
        agents = {agent for each in found for agent in each["agents"]}
        assert len(agents) == 2
        assert all(agent.startswith("~") for agent in agents)


def test_a_lie_moves_only_the_liar(make_daemon: MakeDaemon) -> None:
    """Another tenant cannot see a workflow, nor end it, whatever name it uses."""
    with make_daemon("-t", "1", "--api-key", "ann:k1,bob:k2") as daemon:
        ann = {"Authorization": "Bearer k1", "X-Towerd-Workflow": "w"}
        bob = {"Authorization": "Bearer k2", "X-Towerd-Workflow": "w"}
        body = {"prompt": "Once upon a time", "n_predict": 4}
        daemon.post("/completion", body, headers=ann)
        assert workflows(daemon, headers=bob) == {}
        daemon.post("/towerd/v1/workflows/w/end", {}, 404, headers=bob)
        daemon.post("/completion", body, headers=bob)
        daemon.post("/towerd/v1/workflows/w/end", {}, headers=bob)
        assert set(workflows(daemon, headers=ann)) == {"w"}
        mine = daemon.get("/towerd/v1/segments", headers=ann)["segments"]
        why = daemon.get(f"/towerd/v1/segments/{mine[0]['id']}/why", headers=ann)["why"]
        assert not (why["hot"] or {}).get("ended")
        reply = requests.get(
            f"{daemon.url}/towerd/v1/segments/{mine[0]['id']}/why", headers=bob, timeout=30
        )
        assert reply.status_code == 404


def test_why(make_daemon: MakeDaemon) -> None:
    """Every policy has reasons; the command shows them."""
    for policy in ("lru", "foresight"):
        with make_daemon("-t", "1", "--policy", policy, name=policy) as daemon:
            chat(daemon, "A cat.", session="s")
            segments = daemon.get("/towerd/v1/segments")["segments"]
            leaf = next(each for each in segments if each["children"] == 0)
            found = daemon.get(f"/towerd/v1/segments/{leaf['id']}/why")["why"]
            assert found["policy"] == policy
            assert found["hot"]["place"] == 0
            assert found["hot"]["used"] > 1e9
            target = ("--url", daemon.url)
            shown = CliRunner().invoke(towerctl, ["why", str(leaf["id"]), *target])
            assert shown.exit_code == 0, shown.output
            assert policy in shown.output
            assert f"Segment {leaf['id']}, tokens [" in shown.output
            assert "From RAM it is the first of" in shown.output
            assert "it was last used" in shown.output
            as_json = CliRunner().invoke(towerctl, ["why", str(leaf["id"]), "--json", *target])
            assert json.loads(as_json.output)["why"]["policy"] == policy
            missing = CliRunner().invoke(towerctl, ["why", "99999", *target])
            assert missing.exit_code == 1
            assert "there is no segment 99999" in missing.output


def test_unknown_policy(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("-t", "1", "--policy", "magic")
    daemon.spawn()
    assert daemon.wait() == 2
    assert "magic" in daemon.log


def test_a_recorded_day_replays(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Chats, a restart, more of them; the trace has no word of it, and towerctl replays it."""
    trace = tmp_path / "day.trace"
    daemon = make_daemon("-t", "1", "--record", str(trace))
    with daemon:
        first = daemon.complete("Once upon a time there was a cat who liked to swim.", 20)
        ids = [*daemon.session_ids(daemon.get("/towerd/v1/sessions")["sessions"][0]["id"])]
        assert first["tokens"] == ids[-20:]
        daemon.stop()
        daemon.start()
        daemon.complete([*ids, 300, 301, 302], 20)
        daemon.complete("Another one, about a dog who could not swim at all.", 20)
        daemon.stop()
    text = trace.read_text()
    assert text.count("\n") == 4
    assert "cat" not in text
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    assert lines[1]["in"] == len(ids) + 3
    assert lines[0]["new"] == lines[1]["new"][: len(lines[0]["new"])]
    shown = CliRunner().invoke(
        towerctl, ["lab", "replay", str(trace), "--policy", "lru", "--capacity", "100%", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    row = json.loads(shown.output.splitlines()[0])
    reused = len(lines[0]["new"]) * 16
    assert row["hit_rate"] * sum(line["in"] for line in lines) >= reused


def test_a_trace_of_another_store(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    with make_daemon("-t", "1", "--record", str(trace), name="a") as daemon:
        daemon.stop()
    before = trace.read_bytes()
    other = make_daemon("-t", "1", "--record", str(trace), name="b")
    other.spawn()
    assert other.wait() == 1
    assert "by another store" in other.log
    assert trace.read_bytes() == before
