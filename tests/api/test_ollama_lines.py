"""Streams of our routes as Ollama's lines, however their bytes are cut; the package of Ollama reads them."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from ollama import ChatResponse, GenerateResponse

from towerd.api.ollama.asked import seconds_of
from towerd.api.ollama.bodies import of_chat
from towerd.api.ollama.messages import chat_messages
from towerd.api.ollama.options import sampling
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
    reply = OllamaReply("/v1/chat/completions", "m:latest", ChatReader(), chat_said, 0.0)
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


@pytest.mark.parametrize("has_alternatives", [True, False])
def test_probabilities(has_alternatives: bool) -> None:
    """Each token's own, and those of others where they were asked for."""
    token = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}]}
    chat = ChatReader(has_alternatives=has_alternatives)
    text = TextReader(has_alternatives=has_alternatives)
    choice = {
        "message": {"content": "a"},
        "logprobs": {"content": [token]},
        "finish_reason": "stop",
    }
    for part in (
        chat.of_event({"choices": [{"delta": {}, "logprobs": {"content": [token]}}]}),
        chat.of_whole({"choices": [choice]}),
        text.of_event({"content": "a", "completion_probabilities": [token]}),
        text.of_whole({"content": "a", "completion_probabilities": [token]}),
    ):
        assert part.says_something
        (said,) = part.logprobs
        assert (said["token"], said["logprob"]) == ("a", -0.5)
        assert len(said.get("top_logprobs", ())) == has_alternatives


def test_a_completion_and_an_error() -> None:
    """An error in the middle is the last line, whichever of ours wrote it."""
    reply = OllamaReply("/completion", "m", TextReader(), generate_said, 0.0)
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


def test_calls_without_results() -> None:
    """They take none of a later turn's, whose calls may be in several messages."""
    look: Any = {"function": {"name": "look", "arguments": {}}}
    stop: Any = {"function": {"name": "stop", "arguments": {}}}
    left = {"role": "assistant", "tool_calls": [{"id": "left", **look}]}
    chat = [
        {"role": "assistant", "tool_calls": [look, stop, stop]},
        {"role": "tool", "tool_name": "stop"},
        left,
        {"role": "user", "content": "Never mind."},
        {"role": "assistant", "tool_calls": [{"id": "a", **stop}]},
        {"role": "assistant", "tool_calls": [{"id": "b", **look}]},
        *({"role": "tool"},) * 3,
    ]
    assert [each.get("tool_call_id") for each in chat_messages(chat)[-3:]] == ["a", "b", None]


@pytest.mark.parametrize("more", [{"tool_call_id": "none"}, {"tool_name": "none"}, {}])
def test_many_calls_and_results(more: dict[str, str]) -> None:
    """As many as a body may have take no time that grows with their square."""
    calls = [{"function": {"name": "look", "arguments": {}}}] * 60_000
    results = [{"role": "tool", **more}] * 60_000
    began_s = time.process_time()
    found = chat_messages([{"role": "assistant", "tool_calls": calls}, *results])
    assert time.process_time() - began_s < 10
    ids = [each["id"] for each in found[0]["tool_calls"]]
    wanted = ["none"] * len(ids) if "tool_call_id" in more else ids
    assert [each["tool_call_id"] for each in found[1:]] == wanted


def test_a_picture_in_lines() -> None:
    """Base64 may be broken into lines, as MIME does; what is passed on is not."""
    data = base64.encodebytes(b"\x89PNG" + bytes(100)).decode()
    assert data.count("\n") > 1
    for broken in (data, data.replace("\n", "\r\n")):
        (message,) = chat_messages([{"role": "user", "images": [broken]}])
        url = message["content"][0]["image_url"]["url"]
        assert url == "data:image/png;base64," + data.replace("\n", "")


def test_options_of_another_size() -> None:
    """-1 looks back over all of the context; more tokens than an integer has are as many as it has."""
    options = {"repeat_last_n": -1, "num_predict": 2**32 + 5}
    assert sampling({"options": options}, 4096) == {
        "repeat_last_n": 4096,
        "n_predict": 2**31 - 1,
    }


def test_a_tool_without_a_type() -> None:
    tool = {"function": {"name": "look"}}
    asked = {"messages": [], "tools": [tool, tool | {"type": "function"}, 5]}
    path, body = of_chat(asked, 4096)
    assert path == "/v1/chat/completions"
    assert body["tools"] == [tool | {"type": "function"}] * 2 + [5]


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
        (".5m1.s", 31),
        ("-0", 0),
        ("+0", 0),
        ("7\u00b5s", 7e-6),
        ("7\u03bcs", 7e-6),
        (300, 300),
    ],
)
def test_durations(said: Any, seconds: float) -> None:
    assert seconds_of(said) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "said",
    [
        *("", "5", "m", "5 m", "1h-3m", "\u0661s", [], True),
        pytest.param(10**400, id="a huge number"),
        pytest.param("1" * 60_000, id="a long text"),
    ],
)
def test_no_durations(said: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        seconds_of(said)
