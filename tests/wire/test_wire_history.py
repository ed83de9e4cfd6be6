"""Histories with a bad item in them, as agents send them again with every turn: they are answered, as if
the client had sent them right."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from llama_wire import TEMPLATES, Talker

from towerd.wire import Model, Request, WireError, mended_json

NAMES = (
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "openai-gpt-oss-120b",
    "google-gemma-4-31B-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meetkai-functionary-medium-v3.2",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
)
ID = "abcdefghi"
USER = {"role": "user", "content": "Hi"}
MORE = {"role": "user", "content": "More"}
RESULT = {"role": "tool", "tool_call_id": ID, "content": "42"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": ID, "type": "function", "function": {"name": "f", "arguments": arguments}}


def turn(*calls: Any, **fields: Any) -> dict[str, Any]:
    """A reply that calls tools."""
    return {"role": "assistant", "content": "", "tool_calls": list(calls)} | fields


def loop(made: dict[str, Any], result: dict[str, Any] = RESULT) -> list[Any]:
    """A call, its result, and what the user says then."""
    return [USER, made, result, MORE]


WHOLE = loop(turn(call("{}")))
WRAPPED = json.dumps({"arguments": '{"path": "no'})
BAD: dict[str, tuple[list[Any], list[Any]]] = {
    "empty arguments": (loop(turn(call(""))), WHOLE),
    "blank arguments": (loop(turn(call(" \n"))), WHOLE),
    "null arguments": (loop(turn(call(None))), WHOLE),
    "null as text": (loop(turn(call("null"))), WHOLE),
    "arguments that are an object": (
        loop(turn(call({"a": [1, "é"]}))),
        loop(turn(call('{"a": [1, "é"]}'))),
    ),
    "half a pair in arguments": (
        loop(turn(call('{"a": "\\ud83d"}'))),
        loop(turn(call('{"a": "\ufffd"}'))),
    ),
    "no type": (loop(turn({k: v for k, v in call("{}").items() if k != "type"})), WHOLE),
    "no wrapper": (loop(turn({"id": ID, "name": "f", "arguments": "{}"})), WHOLE),
    "no ids": (
        loop(
            turn({"function": {"name": "f", "arguments": "{}"}}, content=None),
            {"role": "tool", "tool_call_id": None, "content": "42"},
        ),
        loop(turn(call("{}") | {"id": "call00000"}), RESULT | {"tool_call_id": "call00000"}),
    ),
    "functions of old": (
        loop(
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            {"role": "function", "name": "f", "content": "42"},
        ),
        loop(
            turn(call("{}") | {"id": "call00000"}),
            RESULT | {"tool_call_id": "call00000", "name": "f"},
        ),
    ),
    "a custom call": (
        loop(turn({"id": ID, "type": "custom", "custom": {"name": "f", "input": "x"}})),
        loop(turn(call('{"input": "x"}'))),
    ),
    "a result that is an object": (
        loop(turn(call("{}")), RESULT | {"content": {"a": 1}}),
        loop(turn(call("{}")), RESULT | {"content": '{"a":1}'}),
    ),
    "a result without content": (
        loop(turn(call("{}")), {"role": "tool", "tool_call_id": ID}),
        loop(turn(call("{}")), RESULT | {"content": ""}),
    ),
    "a result of no call": ([USER, RESULT, MORE], [USER, {"role": "user", "content": "42"}, MORE]),
    "nulls": (
        [USER, {"role": "assistant", "content": None, "reasoning_content": None}, MORE],
        [USER, {"role": "assistant", "content": ""}, MORE],
    ),
    "no content": (
        [{"role": "user", "content": None}, {"role": "assistant"}, MORE],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, MORE],
    ),
    "an empty array": ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    "odd parts": (
        [{"role": "user", "content": ["a", None, {"type": "input_text", "text": "b"}, {"text": "c"}]}],
        [{"role": "user", "content": [{"type": "text", "text": text} for text in "abc"]}],
    ),
    "thinking and a refusal among parts": (
        [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"},
                                                 {"type": "refusal", "refusal": "No."}]}, MORE],
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "No."}]}, MORE],
    ),
    "two replies at the end": (
        [USER, {"role": "assistant", "content": "One"}, {"role": "assistant", "content": "Two"}],
        [USER, {"role": "assistant", "content": "One\nTwo"}],
    ),
    "two replies, one in parts": (
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "One"}]},
         {"role": "assistant", "content": "Two"}, {"role": "assistant", "content": None}],
        [USER, {"role": "assistant",
                "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]}],
    ),
    "two replies, the first a call": (
        [USER, turn(call("{}")), {"role": "assistant", "content": "Two"}],
        [USER, turn(call("{}")), RESULT | {"content": ""}, {"role": "assistant", "content": "Two"}],
    ),
}  # fmt: skip
"""What a client sends; and what it stands for."""


@pytest.fixture(scope="module", params=NAMES)
def templated(request: pytest.FixtureRequest, story: Talker) -> Model:
    return story.model(chat_template=(TEMPLATES / f"{request.param}.jinja").read_text())


def prompt(model: Model, messages: list[Any]) -> str:
    """What a chat's messages are rendered as."""
    body = {"messages": messages, "tools": [TOOL]}
    return str(json.loads(model.apply_template(json.dumps(body).encode()))["prompt"])


def test_bad_items(templated: Model) -> None:
    """They are rendered as what they stand for, whatever the template."""
    for name, (sent, meant) in BAD.items():
        assert prompt(templated, sent) == prompt(templated, meant), name


def test_arguments_that_are_no_json(templated: Model) -> None:
    """The model reads them, as text where the template takes it, else wrapped."""
    caps = json.loads(templated.props())["chat_template_caps"]
    for text in ('{"path": "no', "hello", "[1]", '"x"', "7"):
        found = prompt(templated, loop(turn(call(text))))
        if caps["supports_object_arguments"]:
            assert found == prompt(templated, loop(turn(call(json.dumps({"arguments": text})))))
        else:
            assert text in found


DIALECTS: dict[str, tuple[str, Any, Any]] = {
    "an input that is text": (
        "messages",
        {"type": "tool_use", "id": ID, "name": "f", "input": '{"path": "no'},
        {"type": "tool_use", "id": ID, "name": "f", "input": {"arguments": '{"path": "no'}},
    ),
    "no input": (
        "messages",
        {"type": "tool_use", "id": ID, "name": "f", "input": None},
        {"type": "tool_use", "id": ID, "name": "f", "input": {}},
    ),
    "a text without text": ("messages", {"type": "text"}, {"type": "text", "text": ""}),
    "a text document": (
        "messages",
        {"type": "document", "source": {"type": "text", "data": "d"}},
        {"type": "text", "text": "d"},
    ),
    "cut off": (
        "responses",
        {"type": "function_call", "call_id": ID, "name": "f", "arguments": '{"path": "no'},
        {"type": "function_call", "call_id": ID, "name": "f", "arguments": WRAPPED},
    ),
    "empty": (
        "responses",
        {"type": "function_call", "id": ID, "name": "f", "arguments": None},
        {"type": "function_call", "call_id": ID, "name": "f", "arguments": "{}"},
    ),
    "a custom call's input": (
        "responses",
        {"type": "custom_tool_call", "call_id": ID, "name": "f", "input": "x"},
        {"type": "function_call", "call_id": ID, "name": "f", "arguments": '{"input": "x"}'},
    ),
    "an untyped reply": (
        "responses",
        {"role": "assistant", "content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    ),
    "a summary alone": (
        "responses",
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "s"}]},
    ),
}


def in_dialect(endpoint: str, item: Any) -> bytes:
    """A chat whose assistant said this block, or item."""
    if endpoint == "messages":
        said = {"role": "assistant", "content": [item, {"type": "text", "text": "Well."}]}
        return json.dumps({"messages": [USER, said, MORE], "max_tokens": 4}).encode()
    return json.dumps({"input": [USER, item, MORE]}).encode()


@pytest.mark.parametrize("name", DIALECTS)
def test_bad_items_of_other_apis(story: Talker, name: str) -> None:
    """Parsed and counted."""
    which, sent, meant = DIALECTS[name]
    endpoint: Any = which
    template = (TEMPLATES / "Qwen3-Coder.jinja").read_text()
    model = story.model(chat_template=template)
    bodies = [in_dialect(which, sent), in_dialect(which, meant)]
    prompts = [Request(model, endpoint, body).prompts[0].tolist() for body in bodies]
    assert prompts[0] == prompts[1]
    assert len({model.count_tokens(endpoint, body) for body in bodies}) == 1


def pieces_of(story: Talker, ids: list[int]) -> str:
    """The text of tokens, special ones too."""
    body = json.dumps({"tokens": ids}).encode()
    return str(json.loads(story.model().detokenize(body))["content"])


def test_two_replies_of_other_apis(story: Talker) -> None:
    """Anthropic's are joined as well; a call between them gets an empty result."""
    model = story.model(chat_template=(TEMPLATES / "Qwen3-Coder.jinja").read_text())
    use = {"type": "tool_use", "id": ID, "name": "f", "input": {}}
    for first in ("One", [{"type": "text", "text": "One"}], [use]):
        said = [{"role": "assistant", "content": content} for content in (first, "Two")]
        body = json.dumps({"messages": [USER, *said]}).encode()
        text = pieces_of(story, Request(model, "messages", body).prompts[0].tolist())
        assert "Two" in text
        assert text.count("<|im_start|>assistant") == (2 if first == [use] else 1)


def test_what_is_wrong_in_another_way(story: Talker) -> None:
    for body in (b'{"messages": 3}', b"[]", b"{", b'{"messages": [3]}'):
        with pytest.raises(WireError):
            Request(story.model(), "chat", body)


def test_nested_input(story: Talker) -> None:
    """The input of a call that is text becomes JSON, which llama.cpp writes out by recursion."""
    nested = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for spare in ("", "\ufeff"):
        use = {"type": "tool_use", "id": "c", "name": "f", "input": spare + nested}
        messages = {"messages": [USER, {"role": "assistant", "content": [use]}, MORE]}
        chat = {"messages": [USER, turn(call(spare + nested)), MORE]}
        endpoint: Any
        for endpoint, body in (("messages", messages), ("chat", chat)):
            sent = json.dumps(body).encode()
            with pytest.raises(WireError, match="more than 200 levels"):
                Request(story.model(), endpoint, sent)


SAID = {"role": "assistant", "content": "said"}
MANY: dict[str, Any] = {
    "parts that say nothing": ("chat", {"messages": [{"role": "user", "content": [1] * 60_000}]}),
    "items that say nothing": ("responses", {"input": [{"type": "web_search_call"}] * 60_000}),
    "replies at the end": ("chat", {"messages": [USER, *[SAID] * 40_000]}),
    "replies of blocks": ("messages", {"messages": [USER, *[SAID] * 40_000]}),
    "calls and results": (
        "chat",
        {
            "messages": [
                USER,
                turn(*[call("")] * 30_000),
                *[RESULT | {"tool_call_id": "x"}] * 30_000,
            ]
        },
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_many_bad_items(story: Talker, name: str) -> None:
    """Repairing takes a time that grows with the body, not with its square. Most are refused
    before their template is rendered, which takes longer."""
    endpoint: Any
    endpoint, body = MANY[name]
    both = {"json_schema": {"type": "object"}, "grammar": 'root ::= "a"'}
    sent = json.dumps(body | both).encode()
    model = story.model()
    began = time.thread_time()
    with suppress(WireError):
        Request(model, endpoint, sent)
    assert time.thread_time() - began < 2


def test_halves_of_pairs() -> None:
    """Whole pairs, and what only looks like an escape, are left alone."""
    for sent, found in (
        (rb'"\ud83d"', rb'"\ufffd"'),
        (rb'"\uD83D\u0041\udE00"', rb'"\ufffd\u0041\ufffd"'),
        (rb'"\ud83d\ude00 \ud83d\ud83d\ude00"', rb'"\ud83d\ude00 \ufffd\ud83d\ude00"'),
        (rb'"\\ud83d \\\ud83d"', rb'"\\ud83d \\\ufffd"'),
        (rb'"\ud8', rb'"\ud8'),
        (b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}', b'{"a": "\xef\xbb\xbf"}'),
    ):
        assert mended_json(sent) == found


LINE = "x-anthropic-billing-header: cc_version=2.1.177.{}; cc_entrypoint=cli; cch={};"
TEXT = "You are Claude Code; cch=1; be kind."


def with_line(shape: str, line: str) -> tuple[str, dict[str, Any]]:
    """An endpoint, and a chat whose system prompt begins with the line."""
    one, two = [line + TEXT], [line, TEXT]
    if shape == "system":
        return "messages", {"system": one[0], "messages": [USER]}
    if shape == "blocks":
        blocks = [{"type": "text", "text": text} for text in two if text]
        return "messages", {"system": blocks, "messages": [USER]}
    if shape == "instructions":
        return "responses", {"instructions": one[0], "input": "Hi"}
    if shape == "item":
        item = {"role": "developer", "content": [{"type": "input_text", "text": one[0]}]}
        return "responses", {"input": [item, USER]}
    if shape == "parts":
        parts = [{"type": "text", "text": text} for text in two if text]
        return "chat", {"messages": [{"role": "system", "content": parts}, USER]}
    if shape == "message of its own":
        systems = [{"role": "system", "content": text} for text in two if text]
        return "chat", {"messages": [*systems, USER]}
    return "chat", {"messages": [{"role": "system", "content": one[0]}, USER]}


SHAPES = "system", "blocks", "instructions", "item", "parts", "message of its own", "chat"


@pytest.mark.parametrize("shape", SHAPES)
def test_billing_line(story: Talker, shape: str) -> None:
    """Whatever its values, and without `cch`: the prompt is the one without the line."""
    model = story.model(chat_template="chatml")
    endpoint: Any
    endpoint, body = with_line(shape, "")
    meant = Request(model, endpoint, json.dumps(body).encode())
    for line in (
        LINE.format("01c", "a5145"),
        LINE.format("2ab", "00000") + "\n",
        "x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=sdk-cli;",
        LINE.format("01c", "a5145") + " cc_workload=cron;",
        "x-anthropic-billing-header: cc_version=2.1.88.a3f; cch=a5145\n",
    ):
        _, body = with_line(shape, line)
        data = json.dumps(body).encode()
        found = Request(model, endpoint, data)
        assert found.prompts[0].tolist() == meant.prompts[0].tolist()
        assert found.agent == meant.agent


@pytest.mark.parametrize("role", ["user", "system"])
def test_other_lines_are_text(story: Talker, role: str) -> None:
    """What the user says, what follows in the system prompt, and other headers."""
    model = story.model(chat_template="chatml")
    line = LINE.format("01c", "a5145")
    texts = [f" {line}", "x-anthropic-billing-header: v=1; cch=a5145;x", "cch=a5145; no header"]
    texts += [line + TEXT] if role == "user" else [f"Be kind.\n{line}"]
    for text in texts:
        body = json.dumps({"messages": [{"role": role, "content": text}, USER]}).encode()
        assert text in json.loads(model.apply_template(body))["prompt"]
