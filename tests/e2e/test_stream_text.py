"""What a stream says of its reply: all of the text, and where it begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from daemon import Daemon
from openai import OpenAI

CHINESE = "root ::= [\u4e00-\u9fa5]*"
"""A character is three tokens of the bundled model."""


def events_of(daemon: Daemon, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = requests.post(f"{daemon.url}{path}", json=body | {"stream": True}, timeout=60)
    reply.raise_for_status()
    lines = reply.text.splitlines()
    return [json.loads(each[6:]) for each in lines if each.startswith("data: {")]


def test_text_that_a_stop_string_holds_back_is_said_at_the_limit(openai: OpenAI) -> None:
    """Where the reply ends with what may have become a stop string."""
    chat, text, respond = (
        openai.chat.completions.create,
        openai.completions.create,
        openai.responses.create,
    )
    of_chat: Any = {"model": "m", "messages": [{"role": "user", "content": "Tell me."}]}
    of_text: Any = {"model": "m", "prompt": "Once upon a time"}
    of_response: Any = {"model": "m", "input": "Tell me."}
    for each in (of_chat, of_text):
        each |= {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    of_response |= {"max_output_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}

    whole = str(chat(**of_chat).choices[0].message.content)
    of_chat["stop"] = [whole[-3:] + "@@"]
    streamed = [each.choices[0].delta.content for each in chat(**of_chat, stream=True)]
    assert "".join(filter(None, streamed)) == chat(**of_chat).choices[0].message.content == whole

    whole = text(**of_text).choices[0].text
    of_text["stop"] = [whole[-3:] + "@@"]
    streamed = [each.choices[0].text for each in text(**of_text, stream=True)]
    assert "".join(streamed) == text(**of_text).choices[0].text == whole

    whole = respond(**of_response).output_text
    of_response["extra_body"] = {"ignore_eos": True, "stop": [whole[-3:] + "@@"]}
    events = list(respond(**of_response, stream=True))
    id = events[-1].response.id
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == whole
    assert events[-1].response.output_text == whole
    assert openai.responses.retrieve(id).output_text == whole


def test_held_back_text_stays_in_its_block(daemon: Daemon) -> None:
    """Of Anthropic's events: each block begins once."""
    of_message: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me."}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = daemon.post("/v1/messages", of_message)["content"][0]["text"]
    for stop in (whole[-3:] + "@@", whole + "@@"):
        events = events_of(daemon, "/v1/messages", **of_message, stop_sequences=[stop])
        begun = [each["index"] for each in events if each["type"] == "content_block_start"]
        assert begun == [0]
        texts = [each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]
        assert "".join(texts) == whole


@pytest.mark.parametrize("n_max", [1, 24])
def test_a_stream_that_begins_within_a_character_has_its_beginning(
    daemon: Daemon, n_max: int
) -> None:
    """Once, before its first text, or without any."""
    asked: dict[str, Any] = {"model": "m", "grammar": CHINESE, "ignore_eos": True}
    message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": n_max}
    types = [
        each["type"]
        for each in events_of(daemon, "/v1/responses", **asked, input="Hi", max_output_tokens=n_max)
    ]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types.count("response.created") == types.count("response.in_progress") == 1
    assert (types.count("response.output_text.delta") > 1) == (n_max > 1)
    types = [each["type"] for each in events_of(daemon, "/v1/messages", **asked, **message)]
    assert (types[0], types.count("message_start")) == ("message_start", 1)
    assert types.count("content_block_start") == types.count("content_block_stop") == 1
    assert (types.count("content_block_delta") > 1) == (n_max > 1)
    deltas = [
        each["choices"][0]["delta"]
        for each in events_of(daemon, "/v1/chat/completions", **asked, **message)
        if each["choices"]
    ]
    assert [each.get("role") for each in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert (sum(bool(each.get("content")) for each in deltas) > 1) == (n_max > 1)
