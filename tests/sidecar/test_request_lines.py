"""The log has one line for each request, on both engines, and no text but a title."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from daemon import Daemon
from waiting import until

from towerd.cli.main import towerctl

MakeDaemon = Callable[..., Daemon]
CHAT = [{"role": "user", "content": "Tell me a story about a cat that nobody has ever seen before"}]
TITLE = '"Tell me a story about a cat that nobody…"'
SECRET = "nobody has ever"


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """The lines of requests, of a log in JSON."""
    found = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    return [line for line in found if line["logger"] == "towerd.request"]


def ask(daemon: Daemon, path: str, body: dict[str, Any], key: str = "") -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return requests.post(daemon.url + path, json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_a_line_a_request(make_sidecar: MakeDaemon, engine: str) -> None:
    """Where tokens came from, how fast, and why some were evaluated; refusals, too."""
    with make_sidecar("--engine", engine, "--log-format", "json") as daemon:
        body = {"messages": CHAT, "max_tokens": 6, "temperature": 0}
        said = ask(daemon, "/v1/chat/completions", body).json()["choices"][0]["message"]
        more = {"messages": [*CHAT, said, {"role": "user", "content": "Go on"}], "max_tokens": 6}
        ask(daemon, "/v1/chat/completions", more | {"stream": True})
        ask(daemon, "/v1/responses", {"input": "Hi", "max_output_tokens": 2})
        ask(daemon, "/completion", {"prompt": [5] * 5000})
        ask(daemon, "/v1/embeddings", {"input": CHAT[0]["content"]})
        until(lambda: len(lines(daemon)) == 5)
        first, second, third, long, refused = lines(daemon)
        memory = [line for line in daemon.log.splitlines() if '"towerd.memory"' in line]
        assert len(memory) == 1
        assert "--hot-bytes" in memory[0]
    assert first["message"] == second["message"] == TITLE
    assert first["why"] == "nothing of it was stored"
    assert first["tokens"] == 6
    assert second["live"] > first["evaluated"] - 2
    assert second["why"] == f"new from token {second['live']} on"
    assert second["ttft_s"] < 60
    assert second["session"] == first["session"]
    assert third["message"] == '"Hi"'
    assert (long["message"], long["status"]) == ("/completion", 400)
    assert "exceeds the available context" in long["error"]
    assert (refused["message"], refused["status"]) == ("/v1/embeddings", 400)
    assert "--embeddings" in refused["error"]


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_what_changed_in_a_prompt(make_sidecar: MakeDaemon, tiny_model: Path, engine: str) -> None:
    """The log says it in a phrase, towerctl with the text on both sides."""
    rules = "Be brief, and kind to whoever asks, and say so if you do not know. " * 3
    flags = ("-m", str(tiny_model), "--engine", engine, "--log-format", "json")
    with make_sidecar(*flags) as daemon:
        for day in (25, 26):
            system = {"role": "system", "content": f"Today is Nov {day}. {rules}"}
            ask(daemon, "/v1/chat/completions", {"messages": [system, *CHAT], "max_tokens": 2})
            until(lambda day=day: len(lines(daemon)) == day - 24)  # type: ignore[misc]
        line = lines(daemon)[1]
        command = ["why", line["request"], "--socket", str(daemon.socket)]
        shown = CliRunner().invoke(towerctl, command)
        as_json = CliRunner().invoke(towerctl, [*command, "--json"])
    assert re.fullmatch(r"system prompt changed at token \d+: 'Nov 25' -> 'Nov 26'", line["why"]), (
        line
    )
    assert shown.exit_code == 0, shown.output
    said = shown.output.splitlines()
    assert said[1] == line["why"]
    assert said[2].startswith(f'Diverged from "{CHAT[0]["content"]}" (')
    assert [each[:24] for each in said[4:6]] == [
        "  stored  5. Be brief, a",
        "  sent    6. Be brief, a",
    ]
    assert "put what changes at the end" in said[6]
    assert json.loads(as_json.output)["why"] == line["why"]


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_texts_of_tenants_are_not_logged(make_sidecar: MakeDaemon, engine: str) -> None:
    """With keys there are no titles, and errors are named alone."""
    keys = ("--api-key", "alice:one,bob:two", "--log-level", "debug")
    with make_sidecar("--engine", engine, *keys) as daemon:
        ask(daemon, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}, "one")
        ask(daemon, "/completion", {"prompt": CHAT[0]["content"], "grammar": SECRET}, "two")
        broken = f'{{"prompt": "{SECRET}'
        headers = {"Authorization": "Bearer two"}
        requests.post(daemon.url + "/completion", data=broken, headers=headers, timeout=60)
        until(lambda: daemon.log.count(" request: ") == 3)
        assert " request: /v1/chat/completions  " in daemon.log
        assert "error=invalid_request_error" in daemon.log
        assert SECRET not in daemon.log
