"""What cannot be done is refused on both engines under a status that clients do not retry, in llama-server's words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon

from towerd.cli.bench.harness.servers import llama_server as llama_server_alone
from towerd.models.bundled import bundled_model

TEXT = "once upon a time " * 400
TURN = [{"role": "user", "content": TEXT}]
PICTURE = "data:image/png;base64,iVBORw0KGgo="

LONG: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": TEXT}),
    ("/completion", {"prompt": [5] * 512}),
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/chat/completions", {"messages": TURN}),
    ("/v1/responses", {"input": TEXT}),
    ("/v1/messages", {"messages": TURN, "max_tokens": 4}),
]

FINAL: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": "a"}, "--embeddings"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "--reranking"),
    (
        "/infill",
        {"input_prefix": "a", "input_suffix": "b"},
        "Infill is not supported by this model",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": PICTURE}}],
                }
            ]
        },
        "mmproj",
    ),
    ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["AA=="]}}, "multimodal"),
    ("/slots/0?action=save", {"filename": "x"}, "--slot-save-path"),
]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("embedded"), "-c", "512", "-t", "1") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def one_slot(llama_server: Path) -> Iterator[str]:
    """URL of a llama-server that gives one conversation the whole context, as towerd does."""
    with llama_server_alone(bundled_model(), "-c", "512", "-np", "1", "-t", "1") as server:
        yield server.url


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), LONG)
def test_a_prompt_longer_than_the_context(
    embedded: Daemon, sidecar: Daemon, one_slot: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    """On both engines the same reply on every route: llama-server's to the letter, or with the words and the
    shape that programs of another API look for."""
    replies = [
        requests.post(url + path, json=body | {"stream": stream}, timeout=60)
        for url in (one_slot, embedded.url, sidecar.url)
    ]
    assert [reply.status_code for reply in replies] == [400] * 3
    theirs, *ours = [reply.json() for reply in replies]
    error = theirs["error"]
    assert error["type"] == "exceed_context_size_error"
    words = ours[0]["error"]["message"]
    if path == "/v1/messages":
        most = f"prompt is too long: {error['n_prompt_tokens']} tokens > {error['n_ctx']} maximum"
        theirs = {"type": "error", "error": {"type": "invalid_request_error", "message": most}}
    elif path != "/completion":
        assert words.endswith(error["message"])
        assert f"maximum context length is {error['n_ctx']} tokens." in words
        error |= {"code": "context_length_exceeded", "message": words}
    assert ours == [theirs, theirs]


@pytest.mark.parametrize(("path", "body", "words"), FINAL)
def test_what_will_never_work(
    embedded: Daemon, sidecar: Daemon, path: str, body: dict[str, Any], words: str
) -> None:
    """llama-server says 500 or 501, which openai's and Anthropic's libraries repeat."""
    for daemon in (embedded, sidecar):
        reply = requests.post(daemon.url + path, json=body, timeout=60)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, 400), reply.text
        assert error["type"] in ("not_supported_error", "invalid_request_error")
        assert words in error["message"]
