"""Requests that cannot be served get llama-server's error, and nothing else suffers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from daemon import Daemon

TEN_MB = 10_000_000


@pytest.fixture(autouse=True)
def unharmed(daemon: Daemon) -> Iterator[None]:
    """Before and after, the daemon idles, answers, and stores no more for what was refused."""
    before = daemon.complete("Unharmed", 2)
    yield
    after = daemon.complete("Unharmed", 2)
    assert after["content"] == before["content"]
    assert daemon.n_processing() == 0
    assert daemon.log.count("Traceback") == 0, daemon.log


def error_of(daemon: Daemon, path: str, status: int = 400, **kwargs: Any) -> dict[str, Any]:
    """The error of a POST, whose shape is checked."""
    reply = requests.post(daemon.url + path, timeout=60, **kwargs)
    assert reply.status_code == status, reply.text
    assert reply.headers["Content-Type"].startswith("application/json")
    error: dict[str, Any] = reply.json()["error"]
    assert error["code"] == ("context_length_exceeded" if is_too_long(path, error) else status)
    assert error["message"]
    return error


def is_too_long(path: str, error: dict[str, Any]) -> bool:
    """Whether a prompt of one of OpenAI's endpoints exceeds the context: it has their code."""
    return path.startswith("/v1/") and error["type"] == "exceed_context_size_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_prompt_over_the_context(daemon: Daemon, path: str, stream: bool) -> None:
    """The error says by how much, before a stream begins."""
    text = "once upon a time " * 400
    ids = daemon.post("/tokenize", {"content": text, "add_special": True})["tokens"]
    prompt = (
        {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": ids}
    )
    error = error_of(daemon, path, json=prompt | {"stream": stream})
    assert error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == 512
    assert error["n_prompt_tokens"] >= len(ids)
    assert str(error["n_prompt_tokens"]) in error["message"]


def test_prompt_that_just_fits(daemon: Daemon) -> None:
    """One token below the context is served, the context itself is not."""
    reply = daemon.complete([5] * 511, 10)
    assert reply["tokens_predicted"] == 1
    assert reply["truncated"] is True
    assert error_of(daemon, "/completion", json={"prompt": [5] * 512})["n_prompt_tokens"] == 512


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{not json}",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"prompt": "a"} trailing',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000,
        b"nul",
        b'{"prompt": 1e999999}',
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/tokenize"])
def test_invalid_json(daemon: Daemon, path: str, body: bytes) -> None:
    """What is not JSON, or not an object, or nested without end."""
    assert error_of(daemon, path, data=body)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_predict", "ten"),
        ("n_predict", -2),
        ("temperature", "hot"),
        ("temperature", [1]),
        ("top_k", {}),
        ("seed", "x"),
        ("stop", [5]),
        ("stream", "yes"),
        ("json_schema", []),
        ("cache_prompt", 1),
        ("n", 99),
    ],
)
def test_wrong_type(daemon: Daemon, field: str, value: Any) -> None:
    """The error names the field."""
    error = error_of(daemon, "/completion", json={"prompt": "a", "n_predict": 1, field: value})
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [5, None, {}, [], [[]], [1, {"a": 1}], [-1], [512], [1, 2**40], [None], [True], [1.5]],
)
def test_wrong_prompt(daemon: Daemon, prompt: Any) -> None:
    """Neither text nor tokens of this vocabulary, or nothing at all."""
    body = {"prompt": prompt, "n_predict": 1}
    assert error_of(daemon, "/completion", json=body)["type"] == "invalid_request_error"


def test_empty_prompt(daemon: Daemon) -> None:
    """It is the BOS token, which begins every conversation: none is taken for its continuation."""
    sessions = set()
    for prompt in ("", "The cat sat", "A dog ran away"):
        body = {"prompt": prompt, "n_predict": 1}
        reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
        assert (reply.json()["tokens_evaluated"] == 1) == (prompt == "")
        sessions.add(reply.headers["X-Towerd-Session"])
    assert len(sessions) == 3


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        {},
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_wrong_messages(daemon: Daemon, messages: Any) -> None:
    """A chat that is none."""
    reply = requests.post(
        daemon.url + "/v1/chat/completions", json={"messages": messages}, timeout=60
    )
    assert reply.status_code == 400, reply.text
    assert set(reply.json()["error"]) >= {"code", "message", "type"}


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "root ::= ("},
        {"grammar": 'root ::= missing "a"'},
        {"grammar": "nonsense"},
        {"grammar": "root ::= root"},
        {"json_schema": {"type": "spaceship"}},
        {"json_schema": {"$ref": "https://example.com/schema.json"}},
        {"json_schema": {"$ref": "#/nowhere"}},
    ],
)
def test_wrong_grammar(daemon: Daemon, fields: dict[str, Any]) -> None:
    """A grammar or schema that cannot be followed is refused, not ignored and never fetched."""
    body = {"prompt": "a", "n_predict": 2, **fields}
    reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
    assert reply.status_code == 400, reply.text


def test_unknown_model(daemon: Daemon) -> None:
    """Clients name all kinds of models: the one there is answers, and says which it is."""
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/completion", {"prompt": "a"}),
    ):
        reply = daemon.post(path, body | {"model": "gpt-9", "max_tokens": 1})
        assert reply["model"] == "stories260K.gguf"


def test_unknown_route_and_method(daemon: Daemon) -> None:
    """404 and 405 have the same shape as the rest."""
    assert error_of(daemon, "/v1/nothing", 404, json={})["type"] == "not_found_error"
    reply = requests.get(daemon.url + "/completion", timeout=10)
    assert reply.status_code == 405
    assert reply.json()["error"]["code"] == 405
    assert error_of(daemon, "/v1/embeddings", 400, json={})["type"] == "not_supported_error"


def test_ten_megabytes(daemon: Daemon) -> None:
    """Three at once, as text, as tokens and as a chat: each gets a clear error, and meanwhile
    health checks and other requests are answered."""
    text = "Once upon a time there was a girl. " * (TEN_MB // 35)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/completion", {"prompt": text}),
        ("/completion", {"prompt": [10] * (TEN_MB // 4)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ]
    errors: list[dict[str, Any]] = []

    def send(path: str, data: bytes) -> None:
        errors.append(error_of(daemon, path, data=data))

    senders = [threading.Thread(target=send, args=(p, json.dumps(b).encode())) for p, b in bodies]
    n_healthy, n_replies = 0, 0
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        n_healthy += daemon.get("/health") == {"status": "ok"}
        n_replies += daemon.complete("Meanwhile", 2)["tokens_predicted"] == 2
    assert [error["type"] for error in errors] == ["exceed_context_size_error"] * 3
    assert all(error["n_prompt_tokens"] > 1_000_000 for error in errors)
    assert n_healthy > 5, "it was over too soon to tell, or nothing was answered meanwhile"
    assert n_replies > 5


def test_body_over_the_limit(daemon: Daemon) -> None:
    """413 for more than --request-bytes-max, without reading it."""
    head = {"Content-Length": str(2**30)}
    request = requests.Request("POST", daemon.url + "/completion", headers=head).prepare()
    request.headers["Content-Length"] = str(2**30)
    with requests.Session() as session:
        reply = session.send(request, timeout=10)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == 413
