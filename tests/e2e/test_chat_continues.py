"""Conversations that are continued from their own tokens, after the daemon was killed and on either engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests
from daemon import Daemon, wait_until_written

pytestmark = pytest.mark.slow

MakeDaemon = Callable[..., Daemon]
PATH = "/towerd/v1/sessions/agent"
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0}


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_continued_after_kill(make_daemon: MakeDaemon, engine: str) -> None:
    """What Claude Code began, say: all of it resumes from the disk, and what is added is recorded behind it. A
    client that sends the same tokens gets the same answer."""
    flags = ("-m", "stories", "-c", "512", "-t", "1", "--engine", engine, "--no-anticipate")
    daemon = make_daemon(*flags).start()
    asked: Any = {
        "system": "You tell stories. " * 4,
        "messages": [{"role": "user", "content": "Once"}],
    }
    reply = requests.post(
        f"{daemon.url}/v1/messages",
        json={**asked, **GREEDY},
        headers={"X-Towerd-Session": "agent"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    wait_until_written(daemon)
    before = daemon.session_ids("agent")
    daemon.kill()
    daemon.start()
    read = daemon.get(f"{PATH}/chat")
    assert (read["tokens"], read["continues"]) == (len(before), True)
    said = daemon.post(f"{PATH}/chat", {**GREEDY, "message": {"content": "And then?"}})
    after = daemon.session_ids("agent")
    assert after[: len(before)] == before
    assert said["timings"]["cache_n"] >= len(before) - 2
    assert [each["parent"] for each in daemon.get(PATH)["turns"]] == [None, read["turn"]]
    prompt = after[: said["usage"]["prompt_tokens"]]
    assert said["choices"][0]["message"]["content"] == daemon.complete(prompt, 16)["content"]
