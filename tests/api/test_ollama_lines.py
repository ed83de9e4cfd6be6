"""Streams of our routes as Ollama's lines, however their bytes are cut; the package of Ollama reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ollama import ChatResponse, GenerateResponse

from towerd.api.ollama.asked import seconds_of
from towerd.api.ollama.messages import chat_messages
from towerd.api.ollama.parts import ChatReader, TextReader
from towerd.api.ollama.replies import OllamaReply, chat_said, generate_said
from towerd.errors import InvalidRequest

TIMINGS = {"cache_n": 30, "prompt_n": 12, "prompt_ms": 1.5, "predicted_n": 9, "predicted_ms": 4.0}


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def call(index: int, arguments: str, **more: str) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    function = {**name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "function": function, **more}]}


def cut(stream: bytes, n: int) -> list[bytes]:
    return [stream[at : at + n] for at in range(0, len(stream), n)]


@pytest.mark.parametrize("n", [1, 7, 64, 10_000])
def test_a_chat(n: int) -> None:
    """Comments, pings, names of events and the end mark leave no line; calls come whole, one that was cut off not
    at all."""
    stream = b"".join(
        (
            b":\n\n",
            chunk({"role": "assistant", "content": None}),
            chunk({"reasoning_content": "A city, é."}),
            b": the model is loading, 40%\n\nevent: ping\n\n",
            chunk({"content": "Look"}),
            chunk(call(0, '{"ci', id="a1", name="look")),
            chunk(call(0, 'ty": "Paris", "n": [1]}')),
            chunk(call(1, "", id="a2", name="stop")),
            chunk(call(2, '{"city": "Ro', id="a3", name="look")),
            chunk({}, "length", timings=TIMINGS, towerd={"session": "s"}),
            b"data: [DONE]\n\n",
        )
    )
    reply = OllamaReply("/v1/chat/completions", "m:latest", ChatReader(), chat_said)
    lines = (b"".join(map(reply.feed, cut(stream, n))) + reply.rest()).splitlines()
    parts = [ChatResponse.model_validate_json(line) for line in lines]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.model for part in parts} == {"m:latest"}
    assert "".join(part.message.thinking or "" for part in parts) == "A city, é."
    assert "".join(part.message.content or "" for part in parts) == "Look"
    calls = [each.function for part in parts for each in part.message.tool_calls or ()]
    assert [(each.name, dict(each.arguments)) for each in calls] == [
        ("look", {"city": "Paris", "n": [1]}),
        ("stop", {}),
    ]
    last = parts[-1]
    assert (last.done_reason, last.prompt_eval_count, last.eval_count) == ("length", 42, 9)
    assert (last.prompt_eval_duration, last.eval_duration) == (1_500_000, 4_000_000)


def test_a_completion_and_an_error() -> None:
    """An error in the middle is the last line, whichever of ours wrote it."""
    reply = OllamaReply("/completion", "m", TextReader(), generate_said)
    stream = b'data: {"content": "Once", "stop": false}\n\n'
    end = b'data: {"content": "", "stop": true, "stop_type": "eos", "timings": {}}\n\n'
    said = [GenerateResponse.model_validate_json(line) for line in reply.feed(stream + end).split()]
    assert [each.response for each in said] == ["Once", ""]
    assert said[-1].done_reason == "stop"
    theirs = b'data: {"error": {"code": 500, "message": "It broke.", "type": "server_error"}}\n\n'
    for failure in (theirs, b'{"error":"It broke."}\n'):
        assert json.loads(reply.feed(failure)) == {"error": "It broke."}


def test_results_find_their_calls() -> None:
    """By their ids, by the tool's name, by their order; ids that are made up are the same in every turn."""
    look: Any = {"function": {"name": "look", "arguments": {}}}
    stop: Any = {"function": {"name": "stop", "arguments": {}}}
    chat: list[Any] = [
        {"role": "assistant", "tool_calls": [look, stop, {"id": "given", **look}]},
        {"role": "tool", "tool_name": "stop", "content": "2"},
        {"role": "tool", "tool_call_id": "given", "content": "3"},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "tool_calls": [stop]},
        {"role": "tool", "content": "4"},
    ]
    found = chat_messages(chat)
    ids = [each["id"] for message in (found[0], found[4]) for each in message["tool_calls"]]
    assert len(set(ids)) == 4
    assert ids[2] == "given"
    results = [message["tool_call_id"] for message in found if message["role"] == "tool"]
    assert results == [ids[1], "given", ids[0], ids[3]]
    assert chat_messages(chat[:4]) == found[:4]
    assert found[0]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (0, 0),
        ("0", 0),
        ("0s", 0),
        (-1, -1),
        ("-1m", -60),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        (300, 300),
    ],
)
def test_durations(said: Any, seconds: float) -> None:
    assert seconds_of(said) == seconds


@pytest.mark.parametrize("said", ["", "5", "m", "5 m", "1h-3m", [], True])
def test_no_durations(said: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        seconds_of(said)
