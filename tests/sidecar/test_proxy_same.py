"""The same requests to llama-server alone and through towerd get the same answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from daemon import Daemon
from response_fields import as_llama_server

from towerd.api.http.reply import reshaped

STORY = "Once upon a time there was a little girl who"
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
TOOL = {"name": "look", "description": "Look at it.", "parameters": {"type": "object"}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
OWN_EACH_TIME = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "timings",
    "model",
    "id_slot",
    "cached_tokens",
    "cache_read_input_tokens",
    "input_tokens",
    "t_start",
    "logprob",
    "towerd",
}
"""What two runs of one request may tell apart: names, clocks, and what was cached,
which shows in the last digits of probabilities. And towerd's own field."""

GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": STORY, **GREEDY}),
    ("/completions", {"prompt": [1, 403, 407, 261], **GREEDY}),
    ("/completion", {"prompt": [1, *([403, 407] * 250)], **GREEDY}),
    ("/completion", {"prompt": ["Once", 403, 407], **GREEDY, "return_tokens": True}),
    ("/completion", {"prompt": {"prompt_string": STORY}, **GREEDY, "n_probs": 2}),
    ("/completion", {"prompt": [STORY, "The dog"], **GREEDY}),
    ("/completion", {"prompt": STORY, **GREEDY, "response_fields": ["content", "stop_type"]}),
    ("/completion", {"prompt": STORY, **GREEDY, "stop": [" a"], "id_slot": 9999}),
    ("/completion", {"prompt": STORY, **GREEDY, "max_tokens": 1}),
    ("/completion", {"prompt": STORY, **GREEDY, "cache_prompt": False}),
    ("/v1/completions", {"prompt": STORY, **GREEDY, "logprobs": 2}),
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "n": 2}),
    (
        "/v1/chat/completions",
        {"messages": CHAT, **GREEDY, "response_format": {"type": "json_object"}},
    ),
    (
        "/chat/completions",
        {"messages": CHAT, **GREEDY, "tools": [{"type": "function", "function": TOOL}]},
    ),
    ("/v1/responses", {"input": "Tell me a story.", "temperature": 0, "max_output_tokens": 12}),
    ("/v1/messages", {"messages": CHAT[1:], "system": "Be kind.", **GREEDY}),
    (
        "/v1/messages",
        {"messages": CHAT[1:], **GREEDY, "tools": [{"name": "look", "input_schema": {}}]},
    ),
]

TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "word " * 2000}),
    ("/completion", {"prompt": [403] * 100_000}),
    ("/completion", {"prompt": [403] * 2000, "n": 2}),
    ("/v1/completions", {"prompt": ["word " * 2000], "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2000}]}),
]

OTHERS: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/v1/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/lora-adapters", None),
    ("POST", "/lora-adapters", []),
    ("GET", "/tools", None),
    ("POST", "/tokenize", {"content": STORY, "add_special": True, "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [403, 407]}),
    ("POST", "/apply-template", {"messages": CHAT}),
    ("POST", "/v1/chat/completions/input_tokens", {"messages": CHAT}),
    ("POST", "/v1/messages/count_tokens", {"messages": CHAT[1:]}),
    ("POST", "/v1/responses/input_tokens", {"input": "Tell me"}),
    ("POST", "/embedding", {"content": "a"}),
    ("POST", "/v1/embeddings", {"input": "a"}),
    ("POST", "/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/infill", {}),
    ("POST", "/v1/audio/transcriptions", {}),
    ("POST", "/v1/streams/lookup", {}),
    ("POST", "/v1/chat/completions/control", {"id": "x"}),
    ("POST", "/no/such/endpoint", {"a": 1}),
    ("GET", "/no/such/file", None),
    ("PUT", "/completion", {}),
    ("GET", "/completion", None),
    ("HEAD", "/health", None),
    ("POST", "/props", {}),
    ("GET", "/models/sse", None),
    # Refused before anything is evaluated.
    ("POST", "/completion", {}),
    ("POST", "/completion", {"prompt": None}),
    *(("POST", path, body) for path, body in TOO_LONG),
    ("POST", "/completion", {"prompt": STORY, "n_predict": "many"}),
    ("POST", "/completion", {"prompt": STORY, "grammar": "root ::= ("}),
    ("POST", "/v1/chat/completions", {}),
    ("POST", "/v1/chat/completions", {"messages": 3}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "logprobs": False, "top_logprobs": 2}),
    ("POST", "/v1/messages", {}),
    ("POST", "/v1/responses", {"input": 7}),
    ("POST", "/v1/responses", {}),
]


def scrubbed(value: Any) -> Any:
    """A JSON value without what is another one each time."""
    if isinstance(value, dict):
        return {k: scrubbed(v) for k, v in value.items() if k not in OWN_EACH_TIME}
    return [scrubbed(item) for item in value] if isinstance(value, list) else value


def events_of(text: str) -> list[Any]:
    """A stream's events: their lines, the data decoded."""
    events = []
    for event in text.replace("data: null\n\n", "").split("\n\n"):
        lines = []
        for line in event.split("\n"):
            name, _, rest = line.partition(": ")
            is_json = name == "data" and rest.startswith("{")
            lines.append((name, scrubbed(json.loads(rest)) if is_json else rest))
        events.append(lines)
    return events


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), GENERATIONS)
def test_generation(
    sidecar: Daemon, alone: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Every dialect, whole and streamed: the same keys in the same order, the same words."""
    replies = []
    for base in (alone, sidecar.url):
        reply = requests.post(base + path, json={**body, "stream": stream}, timeout=60)
        assert reply.status_code == 200, reply.text
        replies.append(reply)
    expected, got = replies
    assert got.headers["Content-Type"] == expected.headers["Content-Type"]
    if stream:
        mine = as_llama_server(events_of(got.text))
        assert by_index(mine) == by_index(events_of(expected.text))
    else:
        whole = as_llama_server(got.json())
        assert scrubbed(whole) == scrubbed(expected.json())
        assert list(flat(whole)) == list(flat(expected.json()))


def by_index(events: list[Any]) -> list[Any]:
    """What runs side by side comes in any order: all of the first prompt or choice, then all of
    the second. Ends stay at the end."""

    def index(lines: list[Any]) -> int:
        data = lines[0][1]
        if not isinstance(data, dict):
            return 9
        choices = data.get("choices", [data])
        return int(choices[0].get("index", 0)) if choices else 8

    return sorted(events, key=index)


def flat(value: Any) -> Any:
    """All keys in their order."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from flat(item)
    elif isinstance(value, list):
        for item in value:
            yield from flat(item)


@pytest.mark.parametrize(("method", "path", "body"), OTHERS)
def test_everything_else(sidecar: Daemon, alone: str, method: str, path: str, body: Any) -> None:
    """Status, type and body of what generates nothing; what will never work is 400, not 501."""
    expected, got = (
        requests.request(method, base + path, json=body, timeout=60)
        for base in (alone, sidecar.url)
    )
    if expected.status_code == 501 and b"not_supported_error" in expected.content:
        assert (got.status_code, got.json()["error"]["code"]) == (400, 400)
        assert got.json()["error"] == expected.json()["error"] | {"code": 400}
        return
    if expected.status_code == 500:  # the request is wrong, and clients would ask again
        assert got.status_code == 400
        assert expected.json()["error"]["message"] in got.text
        return
    assert got.status_code == expected.status_code, (got.text, expected.text)
    assert got.headers.get("Content-Type") == expected.headers.get("Content-Type")
    if expected.text.startswith(("{", "[")):
        said = expected.content if expected.ok else reshaped(path, expected.content)
        assert scrubbed(got.json()) == scrubbed(json.loads(said))
    else:
        assert got.content == expected.content


def test_prompts_over_the_context_leave_nothing(sidecar: Daemon) -> None:
    """Whoever refuses them, towerd or llama-server, nothing of them is recorded."""
    before = sidecar.get("/towerd/v1/stats")["store"]["tokens"]
    for path, body in TOO_LONG:
        error = sidecar.post(path, body, 400)["error"]
        assert error["type"] == "exceed_context_size_error"
    assert sidecar.get("/towerd/v1/stats")["store"]["tokens"] == before


def test_properties(sidecar: Daemon, alone: str) -> None:
    """/props is llama-server's own."""
    mine, theirs = sidecar.get("/props"), requests.get(alone + "/props", timeout=30).json()
    assert set(mine) == set(theirs)
    for name in ("total_slots", "chat_template", "build_info", "bos_token", "modalities"):
        assert mine[name] == theirs[name]


def test_slots_without_text(sidecar: Daemon) -> None:
    """/slots is llama-server's, but for what people wrote."""
    sidecar.complete("a secret", 2)
    slots = sidecar.get("/slots")
    assert [slot["id"] for slot in slots] == [0, 1]
    assert "secret" not in json.dumps(slots)
    assert all({"n_ctx", "is_processing"} <= set(slot) for slot in slots)
