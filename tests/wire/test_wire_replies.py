"""Sampling, stops and response shapes: the tokens, the JSON and the events are llama-server's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llama_wire import (
    N_CTX,
    PATHS,
    LlamaServer,
    Talker,
    answer,
    events,
    plain,
    running_server,
)

from towerd.wire import Model, Reply, Request, Writer

TEXT = "Once upon a time"
MESSAGES = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "max_tokens": 12}
SEEDED = {"temperature": 1.5, "seed": 42, "n_predict": 40}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("completion", {"prompt": TEXT, **GREEDY}),
    ("completion", {"prompt": TEXT, **SEEDED, "top_k": 0, "min_p": 0.1, "typical_p": 0.9}),
    ("completion", {"prompt": TEXT, **SEEDED, "mirostat": 2}),
    (
        "completion",
        {
            "prompt": TEXT,
            **SEEDED,
            "samplers": ["xtc", "temperature"],
            "xtc_probability": 0.9,
            "xtc_threshold": 0.05,
        },
    ),
    (
        "completion",
        {
            "prompt": TEXT,
            **SEEDED,
            "repeat_penalty": 1.4,
            "presence_penalty": 0.5,
            "repeat_last_n": 1000,
        },
    ),
    ("completion", {"prompt": TEXT * 3, **SEEDED, "dry_multiplier": 2.0, "dry_allowed_length": 1}),
    ("completion", {"prompt": TEXT, **SEEDED, "samplers": ["adaptive_p"], "adaptive_target": 0.3}),
    ("completion", {"prompt": TEXT, **SEEDED, "logit_bias": [["the", 5.0], [403, False]]}),
    ("completion", {"prompt": TEXT, **SEEDED, "ignore_eos": True, "n_probs": 3}),
    ("completion", {"prompt": TEXT, **SEEDED, "n_probs": 3, "post_sampling_probs": True}),
    (
        "completion",
        {
            "prompt": TEXT,
            **GREEDY,
            "n_predict": 60,
            "stop": ["little girl", " li"],
            "return_tokens": True,
            "n_probs": 1,
        },
    ),
    (
        "completion",
        {"prompt": TEXT, **GREEDY, "n_predict": 60, "stop": ["named Tim", "named Lily x"]},
    ),
    ("completion", {"prompt": TEXT, **GREEDY, "json_schema": {"enum": ["red", "blue"]}}),
    (
        "completion",
        {
            "prompt": TEXT,
            **GREEDY,
            "n_predict": 100,
            "json_schema": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 3, "maximum": 40},
                    "b": {"type": "string", "pattern": "^[a-c]{2,3}$"},
                },
                "required": ["a", "b"],
            },
        },
    ),
    (
        "completion",
        {"prompt": TEXT, **GREEDY, "grammar": 'root ::= "\\u00e9\\U0001F600" [x-z]+ "."'},
    ),
    ("completion", {"prompt": TEXT, **GREEDY, "n_predict": 200, "n_indent": 2}),
    ("completion", {"prompt": TEXT, **GREEDY, "n_predict": 200, "t_max_predict_ms": 1}),
    ("completion", {"prompt": TEXT, **GREEDY, "timings_per_token": True, "return_progress": True}),
    (
        "completion",
        {"prompt": TEXT, **GREEDY, "response_fields": ["content", "timings/cache_n", "x"]},
    ),
    ("completion", {"prompt": [1, 403, "a", 2], **GREEDY}),
    ("completion", {"prompt": [1, *[403] * (N_CTX - 20)], "temperature": 0}),
    ("completions", {"prompt": TEXT, **GREEDY}),
    ("completions", {"prompt": TEXT, **SEEDED, "logprobs": 2}),
    ("completions", {"prompt": TEXT, **GREEDY, "stop": "girl", "echo": True}),
    ("chat", {"messages": MESSAGES, **GREEDY}),
    ("chat", {"messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": 2}),
    (
        "chat",
        {
            "messages": MESSAGES,
            **GREEDY,
            "stream_options": {"include_usage": True},
            "timings_per_token": True,
            "return_progress": True,
            "verbose": True,
        },
    ),
    (
        "chat",
        {
            "messages": MESSAGES,
            **GREEDY,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"const": {"a": [1, None]}}},
            },
        },
    ),
    ("chat", {"messages": [*MESSAGES, {"role": "assistant", "content": "One"}], **GREEDY}),
    ("responses", {"input": TEXT, "instructions": "Be brief.", **GREEDY, "max_output_tokens": 9}),
    (
        "messages",
        {"messages": MESSAGES, "system": "Be brief.", **GREEDY, "stop_sequences": ["girl"]},
    ),
]

DIALECTS: list[tuple[Any, dict[str, Any]]] = [
    ("completion", {"prompt": TEXT, **GREEDY}),
    ("chat", {"messages": MESSAGES, **GREEDY}),
    ("responses", {"input": TEXT, **GREEDY}),
    ("messages", {"messages": MESSAGES, **GREEDY}),
]


def label(case: tuple[str, dict[str, Any]]) -> str:
    return f"{case[0]}-{','.join(sorted(set(case[1]) - set(GREEDY) - set(SEEDED)))}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_same_reply(
    server: LlamaServer, story: Talker, model: Model, case: tuple[Any, dict[str, Any]], stream: bool
) -> None:
    """The bundled model's reply, whole and as events."""
    endpoint, fields = case
    check(server, story, model, endpoint, fields | {"stream": stream})


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_text(story: Talker, stream: bool) -> None:
    """With --special the token that ends the text is in it."""
    model = story.model(flags=("--special",), defaults={"cache_prompt": False})
    fields = {"prompt": TEXT, **GREEDY, "grammar": 'root ::= "a"', "stream": stream}
    with running_server("--special") as server:
        ours = check(server, story, model, "completion", fields)
    assert b"<s>" in ours


@pytest.mark.parametrize("endpoint", ["completion", "completions"])
def test_several_prompts(pair: LlamaServer, story: Talker, endpoint: Any) -> None:
    """Choices of each prompt in their order, in one reply."""
    model = story.model(n_parallel=2, defaults={"cache_prompt": False})
    body = json.dumps({"prompt": ["One", "Two"], "n": 2, **GREEDY}).encode()
    theirs = pair.post(PATHS[endpoint], body)
    ours = answer(story, model, endpoint, body)
    assert ours.status == theirs.status == 200
    assert without_slots(json.loads(ours.body)) == without_slots(json.loads(theirs.body))


def test_seeds_of_choices(server: LlamaServer, story: Talker) -> None:
    """Each further choice is that of the next seed."""
    model = story.model(n_parallel=3, defaults={"cache_prompt": False})
    fields = {"prompt": TEXT, **SEEDED}
    ours = answer(story, model, "completion", json.dumps(fields | {"n": 3}).encode())
    for k, result in enumerate(json.loads(ours.body)):
        body = json.dumps(fields | {"seed": SEEDED["seed"] + k}).encode()
        alone = json.loads(server.post(PATHS["completion"], body).body)
        assert result["content"] == alone["content"]
        assert result["generation_settings"] == alone["generation_settings"]


@pytest.fixture(scope="module")
def pair() -> Iterator[LlamaServer]:
    """A server with two slots."""
    with running_server("-np", "2", "-kvu") as running:
        yield running


def test_prompts_of_a_stream(pair: LlamaServer, story: Talker) -> None:
    """The events of each prompt are llama-server's, in whichever order they come. It sends `null`
    when it begins with another prompt than the first; towerd does not."""
    model = story.model(defaults={"cache_prompt": False})
    body = json.dumps({"prompt": ["One", "Two"], **GREEDY, "stream": True}).encode()
    theirs = plain(events(pair.post(PATHS["completions"], body).body))
    ours = plain(events(answer(story, model, "completions", body).body))
    assert ours[-1] == theirs[-1] == ["", "[DONE]"]
    assert [of_choice(ours, k) for k in range(2)] == [of_choice(theirs, k) for k in range(2)]


def test_fields_of_our_own(story: Talker, model: Model) -> None:
    """What towerd adds stands in the reply, or in the last event before the end."""
    for endpoint, fields in DIALECTS:
        for stream in (False, True):
            request = Request(model, endpoint, json.dumps(fields | {"stream": stream}).encode())
            reply, writer = Reply(request, 0), Writer(request)
            for chunk in story.chunks(request, reply):
                writer.partial(chunk)
            out = writer.final(reply, 0, 0, b'{"towerd": {"reuse": 1}}')
            last = events(out)[-1][1] if stream else json.loads(out)
            assert last["towerd"] == {"reuse": 1}


def check(
    server: LlamaServer, talker: Talker, model: Model, endpoint: Any, fields: dict[str, Any]
) -> bytes:
    """The same from both; towerd.wire's bytes."""
    body = json.dumps(fields).encode()
    theirs = server.post(PATHS[endpoint], body)
    ours = answer(talker, model, endpoint, body)
    assert ours.status == theirs.status == 200, theirs.body
    if fields["stream"]:
        assert plain(events(ours.body)) == plain(events(theirs.body))
        assert ours.body.endswith(b"data: [DONE]\n\n") == theirs.body.endswith(b"data: [DONE]\n\n")
    else:
        assert plain(json.loads(ours.body)) == plain(json.loads(theirs.body))
    return ours.body


def without_slots(value: Any) -> Any:
    """Results without which slot they came from; timings tell how they were evaluated together."""
    value = plain(value)
    for result in value if isinstance(value, list) else [value]:
        for key in ("id_slot", "timings", "usage"):
            result.pop(key, None)
    return value


def of_choice(stream: Any, index: int) -> list[Any]:
    """The deltas of one choice."""
    return [
        choice
        for _, data in stream[:-1]
        for choice in (data or {"choices": []})["choices"]
        if choice["index"] == index
    ]


@pytest.mark.parametrize(("limit", "status"), [(6, "incomplete"), (400, "completed")])
def test_what_a_response_says_of_its_request(story: Talker, limit: int, status: str) -> None:
    """The fields that are given are in the object of each event and of the whole reply, which is that of
    `response`; the rest is llama-server's."""
    shown = {"store": True, "metadata": {"a": "b"}, "incomplete_details": None}
    model, whole, streamed = story.model(), {}, []
    for stream in (False, True):
        fields = {"input": TEXT, "temperature": 0, "max_output_tokens": limit, "stream": stream}
        request = Request(model, "responses", json.dumps(fields).encode())
        reply, writer = Reply(request, 0), Writer(request, json.dumps(shown).encode())
        out = b"".join(writer.partial(chunk) for chunk in story.chunks(request, reply))
        out += writer.final(reply, 0, 0, b'{"towerd": {}}')
        if not stream:
            whole = json.loads(out)
            assert json.loads(writer.response(0)) | {"towerd": {}} == whole
            continue
        data = [json.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data: ")]
        streamed = [each["response"] for each in data if "response" in each]
        assert json.loads(writer.response(0)) == streamed[-1]
        assert data[-1]["type"] == "response.completed"
    assert len(streamed) == 3
    for made in (whole, *streamed):
        assert made["store"] is True
        assert made["metadata"] == {"a": "b"}
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    for made in (whole, streamed[-1]):
        assert (made["status"], made["incomplete_details"]) == (status, reason)
