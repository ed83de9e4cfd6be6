"""Plain curl against a real daemon: llama-server's own endpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
from daemon import Daemon

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(*args: str) -> str:
    """What curl prints; it fails on an HTTP error."""
    done = subprocess.run(
        ["curl", "-sS", "--fail-with-body", "--max-time", "30", *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def post(daemon: Daemon, path: str, body: Any, *args: str) -> Any:
    return json.loads(curl(daemon.url + path, "-d", json.dumps(body), *args))


def test_completion(daemon: Daemon) -> None:
    """curl's own content type (a form's) does not matter, as with llama-server."""
    reply = post(daemon, "/completion", {"prompt": "Once upon a time", "n_predict": 4})
    assert reply["stop"] is True
    assert reply["stop_type"] == "limit"
    assert reply["tokens_predicted"] == 4
    assert reply["prompt"] == "<s> Once upon a time"
    assert reply["timings"]["cache_n"] + reply["timings"]["prompt_n"] == reply["tokens_evaluated"]


def test_completion_stream(daemon: Daemon) -> None:
    """Events arrive as they are made: `data:` lines, the last with `stop`."""
    body = {"prompt": "Once upon a time", "n_predict": 6, "temperature": 0, "ignore_eos": True}
    out = curl("-N", daemon.url + "/completion", "-d", json.dumps(body | {"stream": True}))
    events = [json.loads(line.removeprefix("data: ")) for line in out.split("\n\n") if line]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    whole = post(daemon, "/completion", body | {"return_tokens": True})
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [i for event in events for i in event["tokens"]] == whole["tokens"]


def test_tokenize_and_back(daemon: Daemon) -> None:
    """Text to ids to text."""
    text = "Lily saw a big red ball. 🎈"
    tokens = post(daemon, "/tokenize", {"content": text})["tokens"]
    assert len(tokens) > 5
    assert all(isinstance(token, int) for token in tokens)
    assert post(daemon, "/detokenize", {"tokens": tokens})["content"].strip() == text
    with_bos = post(daemon, "/tokenize", {"content": text, "add_special": True})["tokens"]
    assert with_bos == [1, *tokens]
    pieces = post(daemon, "/tokenize", {"content": "ball", "with_pieces": True})["tokens"]
    assert "".join(each["piece"] for each in pieces).strip() == "ball"


def test_apply_template(daemon: Daemon) -> None:
    """The prompt that a chat becomes is what a completion of it evaluates."""
    body = {"messages": [{"role": "user", "content": "Hello there"}]}
    prompt = post(daemon, "/apply-template", body)["prompt"]
    assert "Hello there" in prompt
    native = post(daemon, "/completion", {"prompt": prompt, "n_predict": 1})
    chat = post(daemon, "/v1/chat/completions", body | {"max_tokens": 1})
    assert chat["usage"]["prompt_tokens"] == native["tokens_evaluated"]


def test_description(daemon: Daemon) -> None:
    """Health, props, slots and models."""
    assert json.loads(curl(daemon.url + "/health")) == {"status": "ok"}
    props = json.loads(curl(daemon.url + "/props"))
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == 8
    slots = json.loads(curl(daemon.url + "/slots"))
    assert [slot["id"] for slot in slots] == list(range(8))
    models = json.loads(curl(daemon.url + "/v1/models"))
    assert models["data"][0]["meta"]["n_vocab"] == 512


def test_metrics(daemon: Daemon) -> None:
    """Counters move with requests, under llama-server's names and towerd's."""

    def read() -> dict[str, float]:
        values = {}
        for line in curl(daemon.url + "/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values

    before = read()
    post(daemon, "/completion", {"prompt": "metrics", "n_predict": 5, "ignore_eos": True})
    after = read()
    for name in ("llamacpp:tokens_predicted_total", "towerd_tokens_generated_total"):
        assert after[name] == before[name] + 5, name
    assert after["towerd_sessions"] >= 1
    assert after["llamacpp:requests_processing"] == 0
    assert "towerd_loop_lag_seconds_count" in after


def test_openai_shape(daemon: Daemon) -> None:
    """A chat by hand, with the headers that say what was reused."""
    body = {"messages": [{"role": "user", "content": "By hand"}], "max_tokens": 3}
    out = curl(
        "-i",
        daemon.url + "/v1/chat/completions",
        "-d",
        json.dumps(body),
        "-H",
        "Content-Type: application/json",
    )
    head, _, text = out.replace("\r", "").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "x-towerd-reuse: live=" in head.lower()
    assert json.loads(text)["object"] == "chat.completion"
    body["stream"] = True
    stream = curl("-N", daemon.url + "/v1/chat/completions", "-d", json.dumps(body))
    assert stream.rstrip().endswith("data: [DONE]")


def test_error(daemon: Daemon) -> None:
    """curl --fail sees the status; the body is llama-server's."""
    done = subprocess.run(
        ["curl", "-s", "--fail-with-body", daemon.url + "/completion", "-d", "{not json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 22
    error = json.loads(done.stdout)["error"]
    assert error["code"] == 400
    assert error["type"] == "invalid_request_error"
