"""Requests made to break llama.cpp's code are refused quickly, and the process survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llama_wire import NO_DRAFT, TEMPLATES, Talker

from towerd.wire import Model, Reply, Request, WireError, Writer

USER = [{"role": "user", "content": "x"}]
DEEP = b"[" * 100_000


def nested(n: int, inner: Any) -> Any:
    """A schema n objects deep."""
    for _ in range(n):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def typed(n: int) -> Any:
    """A schema that doubles at each of its n levels as it is written out."""
    inner: Any = {"type": "string"}
    for _ in range(n):
        inner = {"type": ["object", "object"], "properties": {"a": inner}}
    return inner


def chained(n: int, *, doubling: bool) -> Any:
    """Definitions of which each leads to the next, once or twice."""
    defs: dict[str, Any] = {f"d{n}": {"type": "string"}}
    for i in range(n):
        ref = {"$ref": f"#/$defs/d{i + 1}"}
        defs[f"d{i}"] = {"anyOf": [ref, ref]} if doubling else {"properties": {"a": ref}}
    return {"$defs": defs, "properties": {"x": {"$ref": "#/$defs/d0"}}}


SCHEMAS: dict[str, Any] = {
    "deep": nested(300, {"type": "string"}),
    "doubling types": typed(60),
    "a long chain of references": chained(5_000, doubling=False),
    "doubling references": chained(40, doubling=True),
    "a circle of references": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "allOf": [{"$ref": "#/$defs/a"}],
    },
    "many optional": {"properties": {f"p{i}": {"type": "string"} for i in range(1_500)}},
    "many optional alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}": {}}} for i in range(1_500)]}]
    },
    "a long name": {"properties": {"%" * 200_000: {"type": "string"}}, "required": ["%" * 200_000]},
    "a long reference": {
        "$defs": {"%" * 200_000: {}},
        "properties": {"a": {"$ref": "#/$defs/" + "%" * 200_000}},
    },
    "a long pattern": {"type": "string", "pattern": "^" + "a{1,2}" * 20_000 + "$"},
    "items that end before they begin": {
        "type": "array",
        "items": {"type": "null"},
        "minItems": 5,
        "maxItems": 2,
    },
    "text that ends before it begins": {"type": "string", "minLength": 9, "maxLength": 3},
    "a deep pattern": {"type": "string", "pattern": "^" + "(" * 101 + "a" + ")" * 101 + "$"},
    "a repetition that ends before it begins": {"type": "string", "pattern": "^a{7,3}$"},
    "digits that end before they begin": {"type": "integer", "minimum": 20_000_000_000_000_000},
    "many items": {"type": "array", "items": {"type": "string"}, "minItems": 2**31 - 1},
}
GRAMMARS: dict[str, str] = {
    "ends before it begins": 'root ::= "a"{3,2}',
    "the same with space": 'root ::= "a" {  3 , # x\n 2 }',
    "deep": "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000,
    "left": 'root ::= root "a"',
    "left behind nothing": 'root ::= e root "a" | "b"\ne ::= "" | "c"',
    "left behind what may be nothing": 'root ::= e root "a" | "b"\ne ::= f f\nf ::= "c"?',
    "left around a corner": 'root ::= e a "x"\na ::= e root "y" | "z"\ne ::= "q"*',
    "a long chain": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1}\n" for i in range(50_000))
    + 'r50000 ::= "a"\n',
    "many ways": "root ::= r0\n"
    + "".join(f'r{i} ::= r{i + 1} "a" | r{i + 1} "b"\n' for i in range(40))
    + 'r40 ::= "a"\n',
    "much": 'root ::= "' + "a" * 100_000 + '"{2000}',
    "an end in it": 'root ::= "a\0"',
}


def refused(model: Model, endpoint: Any, fields: Any) -> WireError:
    """The refusal of a request that must not be accepted."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    with pytest.raises(WireError) as raised:
        Reply(Request(model, endpoint, body), 0)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(model: Model, name: str, endpoint: str) -> None:
    refused(model, endpoint, {"prompt": "a", "messages": USER, "json_schema": SCHEMAS[name]})


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_of_a_tool(story: Talker, name: str) -> None:
    """A tool's parameters are written out as grammar, too, where the template has tools."""
    template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text()
    function = {"name": "f", "parameters": SCHEMAS[name]}
    fields = {"messages": USER, "tools": [{"type": "function", "function": function}]}
    refused(story.model(chat_template=template), "chat", fields)


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammar(model: Model, name: str) -> None:
    found = refused(model, "completion", {"prompt": "a", "grammar": GRAMMARS[name]})
    assert found.message.startswith("Failed to initialize samplers: failed to parse grammar")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= (a? b?)+ "x"\na ::= "a"\nb ::= "b"',
        "root ::= " + " | ".join(f'"w{i}"' for i in range(2_000)),
        "root ::= " + "(" * 900 + '"a"' + ")" * 900,
        'root ::= ( "a" | "b" ){1,2000}',
        '# first\n\n  \n root ::= [^"\\\\(] ")" "\\"(" <[5]> !<[5]> .',
    ],
)
def test_grammar_that_is_harmless(story: Talker, model: Model, text: str) -> None:
    """Grammars that look similar, but are valid: a token can be sampled."""
    body = json.dumps({"prompt": "a", "grammar": text, "n_predict": 1}).encode()
    request = Request(model, "completion", body)
    assert len(list(story.chunks(request, Reply(request, 0)))) == 1


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b'{"a":' * 100_000,
        b'{"prompt": ' + DEEP + b"]" * 100_000 + b"}",
        b'{"prompt": "a", ' + b",".join(b'"k%d": 1' % i for i in range(10_000)) + b"}",
        b'{"prompt": [' + b"1," * 4_000_001 + b"1]}",
    ],
    ids=["arrays", "objects", "a prompt", "keys", "values"],
)
def test_json(model: Model, body: bytes) -> None:
    """Neither too deep, nor objects of too many keys, nor too much of it."""
    for endpoint in ("completion", "chat", "responses", "messages"):
        refused(model, endpoint, body)
    with pytest.raises(WireError):
        model.apply_template(body)


def test_json_in_json(model: Model) -> None:
    """A tool call's arguments are JSON in a string."""
    call = {"type": "function", "function": {"name": "f", "arguments": DEEP.decode()}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]
    refused(model, "chat", {"messages": messages})
    with pytest.raises(WireError):
        model.count_tokens("chat", json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"] * 2_000}, {"stop": "x" * 100_000}, {"n_probs": 100_000},
        {"samplers": ["top_k"] * 100}, {"dry_sequence_breakers": ["x"] * 100},
        {"response_fields": ["content"] * 100}, {"prompt": ["a"] * 2_000},
        {"message_delimiters": [{"role": "user", "delimiter": "x"}] * 100},
        {"grammar_triggers": [{"type": 1, "value": "x"}] * 100},
        {"grammar_triggers": [{"type": 1, "value": "x" * 100_000}]},
        {"grammar_triggers": [{"type": 2, "value": "(a+)+$"}]},
        {"grammar_triggers": [{"type": 99, "value": "x"}]},
        {"temperature": 1e38}, {"dynatemp_exponent": -1}, {"logit_bias": [[1, 1e300]]},
        {"frequency_penalty": -3e38}, {"dry_multiplier": -1},
        {"samplers": ["temperature", "typ_p"], "dynatemp_range": 1, "typical_p": 0.5},
        {"chat_parser": "{}"}, {"chat_format": 2}, {"generation_prompt": "x"},
        {"grammar": 'root ::= "a"', "grammar_type": "tool_calls"},
        {"logit_bias": [[1, 1]] * 200_000}, {"logit_bias": [["girl " * 200_000, 1]]},
        {"reasoning_budget_end_tags": [f"<{i}>" for i in range(100)]},
        {"prompt": [1, "a", 1e30]}, {"prompt": [1, "a", -1.0]}, {"prompt": [["a", 1, -7.0]]},
    ],
    ids=lambda fields: ",".join(fields),
)  # fmt: skip
def test_fields(model: Model, fields: dict[str, Any]) -> None:
    refused(model, "completion", {"prompt": "a", **fields})


def test_fields_that_are_made_to_fit(story: Talker, model: Model) -> None:
    """Windows of history end with the context, and no temperature makes numbers overflow."""
    fields = {
        "prompt": "a",
        "repeat_last_n": 2**31 - 1,
        "repeat_penalty": 1.1,
        "dry_multiplier": 1,
        "dry_penalty_last_n": 2**31 - 1,
        "temperature": 1e-40,
        "n_predict": 3,
    }
    request = Request(model, "completion", json.dumps(fields).encode())
    assert len(list(story.chunks(request, Reply(request, 0)))) == 3
    assert json.loads(request.settings(False))["temperature"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "dynatemp_range": 1e-40},
        {"temperature": 1e-6, "dynatemp_range": 1e-5, "dynatemp_exponent": 3},
        {"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 140},
    ],
)
def test_a_dynamic_temperature_near_zero(
    story: Talker, model: Model, fields: dict[str, float]
) -> None:
    """It samples greedily, as with temperature 0."""

    def said(**more: float) -> list[int]:
        body = {"prompt": "Once upon a time", "n_predict": 8, "seed": 1, **more}
        request = Request(model, "completion", json.dumps(body).encode())
        return [chunk.token for chunk in story.chunks(request, Reply(request, 0))]

    assert said(**fields) == said(temperature=0)


def test_fields_that_are_kept(story: Talker) -> None:
    """Fields that towerd parses itself are short."""
    model = story.model(kept_fields=("lora",))
    request = Request(model, "completion", b'{"prompt": "a", "lora": [{"id": 0}]}')
    assert request.field("lora") == b'[{"id":0}]'
    refused(model, "completion", {"prompt": "a", "lora": [{"id": 0}] * 100_000})


def test_no_token_left(story: Talker, model: Model) -> None:
    """Every token forbidden, by bias or by a grammar that no token of the vocabulary continues."""
    every = [[token, False] for token in range(story.n_vocab)]
    for fields in (
        {"logit_bias": every},
        {"logit_bias": every, "grammar": 'root ::= "a"'},
        {"grammar": "root ::= [b-a]"},
    ):
        request = Request(model, "completion", json.dumps({"prompt": "a", **fields}).encode())
        with pytest.raises(WireError) as raised:
            list(story.chunks(request, Reply(request, 0)))
        assert raised.value.status == 400


def test_no_logits(story: Talker, model: Model) -> None:
    """Asked for what was not computed, as llama.cpp asserts that it was."""
    reply = Reply(Request(model, "completion", b'{"prompt": "a"}'), 0)
    story.clear()
    story.evaluate([1])
    for index in (5, -3, 2**31 - 1):
        with pytest.raises(WireError):
            reply.steps(story.context, index, NO_DRAFT, 1)


def test_output_of_many_brackets(scripted: Callable[..., Talker]) -> None:
    """A reply that is parsed for tool calls is not parsed beyond its bound; another may have any."""
    script = [
        "<tool_call>",
        '\n{"name": "f", "arguments": ',
        *(f'{{"{i}":' * 300 for i in range(9)),
    ]
    talker = scripted(script)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    template = (TEMPLATES / "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja").read_text()
    for tools, fails in (([tool], True), ([], False)):
        body = {
            "messages": USER,
            "temperature": 0,
            "tools": tools,
            "stream": True,
            "max_tokens": 12,
        }
        request = Request(talker.model(chat_template=template), "chat", json.dumps(body).encode())
        writer, raised = Writer(request), False
        try:
            for chunk in talker.chunks(request, Reply(request, 0)):
                writer.partial(chunk)
        except WireError as error:
            raised = "open brackets" in error.message
        assert raised == fails


TOOLS: dict[str, dict[str, Any]] = {
    "a long description": {"name": "f", "description": "x" * 10_000_000},
    "a long schema": {
        "name": "f",
        "parameters": {"properties": {f"p{i}": {"enum": ["x" * 60] * 40} for i in range(3_900)}},
    },
}


def test_ten_megabytes_of_tools(story: Talker) -> None:
    """A prompt too long is the API's to refuse, which knows its context; a schema is refused."""
    model = story.model(chat_template=(TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text())
    tools = [{"type": "function", "function": TOOLS["a long description"]}]
    body = json.dumps({"messages": USER, "tools": tools}).encode()
    assert len(Request(model, "chat", body).prompts[0]) > 1_000_000
    tools = [{"type": "function", "function": TOOLS["a long schema"]}]
    refused(model, "chat", {"messages": USER, "tools": tools})


def test_messages_have_a_bound(story: Talker) -> None:
    """Rendering one takes a while; a chat as long as the bound is counted in its own time."""
    model = story.model()
    body = json.dumps({"messages": USER * 65_537}).encode()
    for refused in (lambda: Request(model, "chat", body), lambda: model.count_tokens("chat", body)):
        with pytest.raises(WireError, match="at most 65536 messages") as error:
            refused()
        assert error.value.status == 400


def test_what_is_counted_is_what_is_evaluated(story: Talker) -> None:
    """The counter and the request agree."""
    model = story.model(chat_template="chatml")
    body = json.dumps({"messages": USER * 500}).encode()
    counted = json.loads(model.count_tokens("chat", body))["input_tokens"]
    assert counted == len(Request(model, "chat", body).prompts[0])
