"""The clients that people use, through towerd in front of a llama-server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
import requests
from anthropic import Anthropic
from daemon import Daemon, reuse_of
from openai import AsyncOpenAI, BadRequestError, OpenAI

MODEL = "stories260K"
HELLO: list[Any] = [{"role": "user", "content": "Tell me about a dog."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "big": {"type": "boolean"}},
    "required": ["colour", "big"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
TOOL = {"name": "look", "description": "Look at something.", "parameters": SCHEMA}


@pytest.fixture
def oai(sidecar: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=sidecar.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(sidecar: Daemon) -> Iterator[Anthropic]:
    with Anthropic(base_url=sidecar.url, api_key="none", max_retries=0) as client:
        yield client


# --- openai -------------------------------------------------------------------------------


def test_openai_chat(oai: OpenAI) -> None:
    """Whole and streamed, the same words."""
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = oai.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    with oai.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_openai_conversation(oai: OpenAI, sidecar: Daemon) -> None:
    """A chat of three turns is one session, and each turn evaluates only what is new."""
    messages: list[Any] = [{"role": "user", "content": "Tell me about a conversation."}]
    names = set()
    for turn in range(3):
        raw = oai.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=12, temperature=0
        )
        names.add(raw.headers["x-towerd-session"])
        reply = raw.parse()
        assert reply.usage is not None
        cached = reply.usage.prompt_tokens_details
        assert cached is not None
        if turn:
            assert reply.usage.prompt_tokens - (cached.cached_tokens or 0) < 40
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": "And then?"},
        ]
    assert len(names) == 1
    turns = sidecar.get(f"/towerd/v1/sessions/{names.pop()}")["turns"]
    assert [turn["finished"] for turn in turns] == [True] * 3


def test_openai_schema(oai: OpenAI) -> None:
    reply = oai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=200,
        seed=2,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "child", "schema": SCHEMA, "strict": True},
        },
    )
    jsonschema.validate(json.loads(reply.choices[0].message.content or ""), SCHEMA)


def test_openai_responses(oai: OpenAI) -> None:
    """The newer endpoint, whole and streamed."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "Tell me about a dog.",
        "max_output_tokens": 12,
        "temperature": 0,
    }
    whole = oai.responses.create(**asked)
    with oai.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    last: Any = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_openai_stored_responses(oai: OpenAI, stream: bool) -> None:
    """A chain and a conversation, of which each turn evaluates only what is new."""

    def ask(text: str, **fields: Any) -> Any:
        asked = {"model": MODEL, "input": text, "max_output_tokens": 12, "temperature": 0, **fields}
        if not stream:
            return oai.responses.create(**asked)
        with oai.responses.create(**asked, stream=True) as events:
            last: Any = list(events)[-1]
        return last.response

    def new_tokens(response: Any) -> int:
        usage = response.usage
        return int(usage.input_tokens - usage.input_tokens_details.cached_tokens)

    text = "Tell me about a lighthouse, its keeper and the ships that pass, in many words. " * 5
    first = ask(f"{stream}. {text}")
    then = ask("And then?", previous_response_id=first.id)
    assert new_tokens(then) < 40 < new_tokens(first)
    assert oai.responses.retrieve(then.id).output_text == then.output_text
    assert len(list(oai.responses.input_items.list(then.id))) == 3
    oai.responses.delete(first.id)
    with pytest.raises(BadRequestError):
        ask("And then?", previous_response_id=first.id)
    made = oai.conversations.create()
    ask(f"{stream}! {text}", conversation=made.id)
    assert new_tokens(ask("When?", conversation=made.id)) < 40
    assert len(list(oai.conversations.items.list(made.id))) == 4


def test_openai_models_and_completions(oai: OpenAI) -> None:
    assert [model.owned_by for model in oai.models.list()] == ["llamacpp"]
    reply = oai.completions.create(
        model=MODEL, prompt=["Once upon a time", "The cat"], max_tokens=6, temperature=0
    )
    assert len({choice.text for choice in reply.choices}) == 2


def test_openai_errors(oai: OpenAI) -> None:
    """Refusals have the classes that openai's users catch."""
    wrong: list[Any] = [{"role": "user"}]
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(model=MODEL, messages=wrong)
    assert caught.value.type == "invalid_request_error"
    long: list[Any] = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(model=MODEL, messages=long)
    assert caught.value.type == "exceed_context_size_error"
    with pytest.raises(openai.BadRequestError) as unsupported:
        oai.embeddings.create(model=MODEL, input="a")
    assert unsupported.value.type == "not_supported_error"


async def test_openai_eight_at_once(sidecar: Daemon, oai: OpenAI) -> None:
    """More streams than slots: each gets its own story, whole."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "temperature": 0}
    prompts: list[list[Any]] = [[{"role": "user", "content": f"Story {i}."}] for i in range(8)]
    alone = [
        oai.chat.completions.create(messages=prompt, **{**asked, "max_tokens": 6})
        .choices[0]
        .message.content
        for prompt in prompts
    ]
    async with AsyncOpenAI(base_url=sidecar.url + "/v1", api_key="none", max_retries=0) as client:

        async def one(prompt: list[Any]) -> tuple[str, int]:
            stream = await client.chat.completions.create(
                messages=prompt,
                stream=True,
                stream_options={"include_usage": True},
                **asked,
                extra_body={"ignore_eos": True},
            )
            async with stream:
                chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            return text, chunks[-1].usage.completion_tokens

        together = await asyncio.gather(*(one(prompt) for prompt in prompts))
    for text, (streamed, n) in zip(alone, together, strict=True):
        assert n == 40
        assert streamed.startswith(text or "?")


# --- anthropic ----------------------------------------------------------------------------


def test_anthropic_messages(claude: Anthropic) -> None:
    """Whole and streamed, the same words."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 16,
        "extra_body": GREEDY,
        "system": "Be kind.",
        "messages": HELLO,
    }
    whole = claude.messages.create(**asked)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 16
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text"
    assert text == block.text
    assert final.stop_reason == "max_tokens"


def test_anthropic_conversation(claude: Anthropic) -> None:
    """Although llama-server drops `id_slot` here, every turn finds what the last one left."""
    messages: list[Any] = [{"role": "user", "content": "Tell me about a talk."}]
    names = set()
    for turn in range(3):
        raw = claude.messages.with_raw_response.create(
            model=MODEL, max_tokens=12, extra_body=GREEDY, messages=messages
        )
        names.add(raw.headers["x-towerd-session"])
        if turn:
            assert reuse_of(raw.headers)["prefill"] < 40
        (block,) = raw.parse().content
        assert block.type == "text"
        messages += [
            {"role": "assistant", "content": block.text},
            {"role": "user", "content": "And then?"},
        ]
    assert len(names) == 1


def test_anthropic_counts_and_errors(claude: Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO)
    asked = claude.messages.create(model=MODEL, max_tokens=1, messages=HELLO).usage
    assert counted.input_tokens == asked.input_tokens + (asked.cache_read_input_tokens or 0)
    long: list[Any] = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=MODEL, max_tokens=1, messages=long)


# --- tools --------------------------------------------------------------------------------

TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"big":true}'}}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory, slow_model: Path) -> Iterator[Daemon]:
    """A sidecar whose chat template knows tools, and has room for them."""
    root = tmp_path_factory.mktemp("tools")
    template = root / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = ("--engine", "llama-server", "-m", str(slow_model), "-c", "8192", "-np", "2")
    with Daemon(root / "d", *flags, "--chat-template-file", str(template)) as daemon:
        yield daemon


@pytest.mark.parametrize("stream", [False, True])
def test_tools_in_openai(with_tools: Daemon, stream: bool) -> None:
    """A chat with tools, a call and its result: towerd knows its prompt to the token, and the
    next turn finds it."""
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a red ball"},
    ]
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    with OpenAI(base_url=with_tools.url + "/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="any", messages=messages, tools=tools, max_tokens=4
        )
        usage = raw.parse().usage
        assert usage is not None
        assert n_prompt(raw.headers) == usage.prompt_tokens > 100
        again = client.chat.completions.with_raw_response.create(
            model="any",
            messages=[*messages, {"role": "user", "content": "And?"}],
            tools=tools,
            max_tokens=4,
            stream=stream,
        )
        again.parse()
        assert n_reused(again.headers) >= usage.prompt_tokens - 16  # the opening of an answer


def test_tools_in_anthropic(with_tools: Daemon) -> None:
    """The same chat in Anthropic's words is the same prompt."""
    messages: list[Any] = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"big": True}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "a red ball"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    tools: list[Any] = [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": "any", "messages": messages, "tools": tools}
    with Anthropic(base_url=with_tools.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(**asked).input_tokens
        raw = client.messages.with_raw_response.create(**asked, max_tokens=4)
        assert n_prompt(raw.headers) == counted > 100
        raw = client.messages.with_raw_response.create(**asked, max_tokens=4)
        assert n_reused(raw.headers) == counted - 1


def test_tools_in_responses(with_tools: Daemon) -> None:
    """And in the words of OpenAI's responses."""
    items: list[Any] = [
        *HELLO,
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a red ball"},
        {"role": "user", "content": "And?"},
    ]
    tools: list[Any] = [{"type": "function", "strict": True, **TOOL}]
    with OpenAI(base_url=with_tools.url + "/v1", api_key="none", max_retries=0) as client:
        raw = client.responses.with_raw_response.create(
            model="any", input=items, tools=tools, instructions="Be kind.", max_output_tokens=4
        )
        usage = raw.parse().usage
    assert usage is not None
    assert n_prompt(raw.headers) == usage.input_tokens > 100


def n_prompt(headers: Any) -> int:
    """Tokens of the prompt, as towerd counted them."""
    return sum(reuse_of(headers).values())


def n_reused(headers: Any) -> int:
    """Those that were not evaluated again."""
    return n_prompt(headers) - reuse_of(headers)["prefill"]


# --- what llama-server's web UI does ------------------------------------------------------


def test_web_ui_requests(sidecar: Daemon) -> None:
    """Its start-up, and a chat as it asks for it: with timings, progress and a resumable id."""
    props = sidecar.get("/props")
    assert props["default_generation_settings"]["n_ctx"] > 0
    assert sidecar.get("/v1/models")["data"]
    assert sidecar.post("/v1/streams/lookup", {"conversation_ids": ["c1"]}) == []
    assert requests.get(sidecar.url + "/tools", timeout=30).status_code == 403
    body: Any = {
        "messages": HELLO,
        "stream": True,
        "return_progress": True,
        "timings_per_token": True,
        "reasoning_format": "auto",
        "max_tokens": 8,
        "cache_prompt": True,
        "samplers": ["top_k"],
        "backend_sampling": False,
    }
    headers = {"X-Conversation-Id": "c1::stories", "Origin": "http://localhost:8080"}
    reply = requests.post(
        sidecar.url + "/v1/chat/completions", json=body, headers=headers, timeout=30
    )
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "prompt_progress" in chunks[0]
    assert chunks[-1]["timings"]["predicted_n"] == 8
    found = sidecar.post("/v1/streams/lookup", {"conversation_ids": ["c1"]})
    assert [stream["is_done"] for stream in found] == [True]


def test_progress_is_no_first_token(sidecar: Daemon) -> None:
    body: Any = {"messages": [{"role": "user", "content": "Tell me a story. " * 25}]}
    body |= {"stream": True, "return_progress": True, "timings_per_token": True, "max_tokens": 2}
    url = sidecar.url + "/v1/chat/completions"
    reply = requests.post(url, json=body, timeout=30)
    chunks = [json.loads(x[6:]) for x in reply.text.split("\n\n") if x.startswith("data: {")]
    assert "prompt_progress" in chunks[0]
    last = sidecar.get("/towerd/v1/requests")["finished"][0]
    assert last["ttft_ms"] >= chunks[-1]["timings"]["prompt_ms"]
