"""What would end a conversation for ever is answered on both engines, and behind a router; Claude Code's
billing line costs no session its prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from daemon import Daemon

from towerd.models.bundled import bundled_model

ENGINES = ("embedded", "llama-server", "router")
USER = {"role": "user", "content": "Hi"}
MORE = {"role": "user", "content": "More"}


def used(text: str) -> dict[str, Any]:
    """A reply with one call."""
    function = {"name": "f", "arguments": text}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}


RESULT = {"role": "tool", "tool_call_id": "c", "content": "42"}
CUT = {"messages": [USER, used('{"path": "no'), RESULT, MORE]}
CUT_USE = {
    "max_tokens": 2,
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "{"}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "42"}]},
        {"role": "assistant", "content": "One"},
        {"role": "assistant", "content": "Two"},
    ],
}
CUT_ITEM = {
    "input": [
        USER,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"path": "no'},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        MORE,
    ],
}
TWO = {"messages": [USER, *({"role": "assistant", "content": text} for text in ("One", "Two"))]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CUT),
    ("/v1/chat/completions", {"messages": [USER, used(""), RESULT, MORE]}),
    ("/v1/chat/completions", TWO),
    ("/v1/chat/completions/input_tokens", CUT),
    ("/apply-template", CUT),
    ("/v1/responses", CUT_ITEM),
    ("/v1/responses/input_tokens", CUT_ITEM),
    ("/v1/messages", CUT_USE),
    ("/v1/messages/count_tokens", CUT_USE),
]
TEXTS: list[tuple[str, str, bytes]] = [
    ("/v1/chat/completions", "messages", b'[{"role": "user", "content": "a \\ud83d"}]'),
    ("/v1/messages", "messages", b'[{"role": "user", "content": "a \\ud83d"}]'),
    ("/v1/responses", "input", b'"a \\ud83d"'),
    ("/completion", "prompt", b'"a \\ud83d"'),
    ("/v1/completions", "prompt", b'"a \\ud83d"'),
    ("/tokenize", "content", b'"a \\ud83d"'),
]


@pytest.fixture(scope="module", params=ENGINES)
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("mended")
    flags = ["-c", "1024", "-t", "1"]
    if request.param == "router":
        (root / "models").mkdir()
        (root / "models" / "story.gguf").symlink_to(bundled_model())
        flags += ["--models-dir", str(root / "models")]
    else:
        flags += ["--engine", request.param]
    with Daemon(root / "d", *flags) as daemon:
        yield daemon


def post(daemon: Daemon, path: str, data: bytes) -> requests.Response:
    return requests.post(daemon.url + path, data=data, timeout=60)


def test_bad_items(daemon: Daemon) -> None:
    """On every endpoint that takes a history, streamed and not."""
    for path, body in BODIES:
        for stream in (False, True):
            asked = {"n_predict": 2, "stream": stream} | body
            reply = post(daemon, path, json.dumps(asked).encode())
            assert reply.status_code == 200, (path, reply.text)
            assert '"error":{' not in reply.text.replace(" ", "")


def test_text_that_is_nearly_json(daemon: Daemon) -> None:
    """Half of a surrogate pair is U+FFFD; a byte-order mark is none of the text."""
    counts: dict[bytes, Any] = {}
    for path, name, value in TEXTS:
        for text in (value, value.replace(b"\\ud83d", "\ufffd".encode())):
            data = b'\xef\xbb\xbf{"%s": %s, "n_predict": 2, "max_tokens": 2}' % (
                name.encode(),
                text,
            )
            reply = post(daemon, path, data)
            assert reply.status_code == 200, (path, reply.text)
            counts[text] = reply.json()
    halves, whole = list(counts.values())[-2:]
    assert halves["tokens"] == whole["tokens"]


def test_billing_line(daemon: Daemon) -> None:
    """A new session of Claude Code evaluates its own words, as a client behind an OpenAI-shaped router
    does."""
    text = " You are Claude Code. " + "Once upon a time there was a little dog. " * 20
    for index, path in enumerate(("/v1/messages", "/v1/chat/completions")):
        n_evaluated = []
        for suffix, said in (("01c", "Hi there"), ("2ab", "Once more")):
            line = f"x-anthropic-billing-header: cc_version=2.1.177.{suffix}; cch=a{index}{suffix};"
            system = line + path + text
            user = {"role": "user", "content": said}
            body: dict[str, Any] = {"messages": [user], "system": system, "max_tokens": 2}
            if path != "/v1/messages":
                body = {"messages": [{"role": "system", "content": system}, user], "max_tokens": 2}
            reply = post(daemon, path, json.dumps(body).encode())
            reuse = dict(part.split("=") for part in reply.headers["X-Towerd-Reuse"].split(","))
            n_evaluated.append(int(reuse["prefill"]))
        assert n_evaluated[0] > 200
        assert n_evaluated[1] < 60


def test_what_was_wrong_stays_wrong(daemon: Daemon) -> None:
    """Repairs are of what agents send; what is no chat at all is refused."""
    for body in (
        b'{"messages": 3}',
        b'{"messages": ["x"]}',
        b"[1]",
        b'{"messages": [{"role": 1}]}',
    ):
        assert post(daemon, "/v1/chat/completions", body).status_code == 400
