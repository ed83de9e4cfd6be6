"""Hints, workflows and reasons in front of a llama-server."""

from __future__ import annotations

from daemon import Daemon


def test_a_workflow(sidecar: Daemon) -> None:
    """As with the embedded engine: two agents, one workflow, its end, and why a segment stays."""
    body = {
        "messages": [
            {"role": "system", "content": "You tell stories."},
            {"role": "user", "content": "About a cat."},
        ],
        "max_tokens": 8,
    }
    for agent in ("teller", None):
        named = {"X-Towerd-Agent": agent} if agent else {}
        headers = {"X-Towerd-Workflow": "flow", "X-Towerd-Session": f"flow-{agent}", **named}
        sidecar.post("/v1/chat/completions", body, headers=headers)
    found = sidecar.get("/towerd/v1/workflows")["workflows"]
    (flow,) = [each for each in found if each["id"] == "flow"]
    assert flow["agents"][0] == "teller"
    assert flow["agents"][1].startswith("~")
    assert flow["sessions"] == ["flow-teller", "flow-None"]
    segments = sidecar.get("/towerd/v1/segments")["segments"]
    leaf = next(each for each in segments if each["children"] == 0)
    why = sidecar.get(f"/towerd/v1/segments/{leaf['id']}/why")["why"]
    assert why["policy"]
    sidecar.post("/towerd/v1/workflows/flow/end", {})
    sidecar.post("/towerd/v1/workflows/flow/end", {}, status=404)
    reply = sidecar.post(
        "/v1/chat/completions", body, status=400, headers={"X-Towerd-Workflow": "x" * 200}
    )
    assert "X-Towerd-Workflow" in reply["error"]["message"]
