"""Twenty turns of an agent that calls a tool in each: every turn evaluates its new tokens alone, although
the clients send the calls back in JSON of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon
from llama_wire import TEMPLATES
from scripted_model import make_scripted_model

MakeDaemon = Callable[..., Daemon]
TURNS = 20
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
FORMATS = {
    "Qwen-Qwen2.5-7B-Instruct": ("<tool_", "call>\n", CALL, "\n</tool_call>"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("<tool_", "call>\n", CALL, "\n</tool_call>"),
    "Qwen3-Coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n", "Paris",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
}  # fmt: skip
"""Chat template -> a call of the tool in its format, in pieces."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NEW_TOKENS_MAX = 160
"""What a template puts around a tool's answer, letter by letter in this vocabulary."""


@pytest.fixture(params=list(FORMATS))
def agent_daemon(request: pytest.FixtureRequest, tmp_path: Path, make_daemon: MakeDaemon) -> Daemon:
    """A model that calls the tool whatever it is told."""
    model = tmp_path / "scripted.gguf"
    make_scripted_model(model, FORMATS[request.param])
    template = TEMPLATES / f"{request.param}.jinja"
    flags = ("-m", str(model), "--ctx-size", "8192", "--chat-template-file", str(template))
    return make_daemon(*flags)


def test_openai(agent_daemon: Daemon) -> None:
    from openai import OpenAI

    with agent_daemon as daemon, OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        function = {"name": "get_weather", "description": "It tells.", "parameters": SCHEMA}
        tools: Any = [{"type": "function", "function": function}]
        messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        for turn in range(TURNS):
            if turn % 2:
                call_id, arguments, usage = streamed(client, messages, tools)
            else:
                reply = client.chat.completions.create(model="m", messages=messages, tools=tools)
                called: Any = reply.choices[0].message.tool_calls
                (call,) = called
                assert reply.choices[0].finish_reason == "tool_calls"
                call_id, arguments, usage = call.id, call.function.arguments, reply.usage
            assert json.loads(arguments) == {"city": "Paris"}
            cached = usage.prompt_tokens_details.cached_tokens
            if turn:
                assert usage.prompt_tokens - cached <= NEW_TOKENS_MAX
            sent = json.dumps(json.loads(arguments), indent=2)
            function = {"name": "get_weather", "arguments": sent}
            calls = [{"id": call_id, "type": "function", "function": function}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": f"Sun {turn}."})


def streamed(client: Any, messages: list[Any], tools: Any) -> tuple[str, str, Any]:
    """The id and the arguments of the call in a streamed reply, and its usage."""
    call_id, arguments, usage = "", "", None
    stream = client.chat.completions.create(
        model="m", messages=messages, tools=tools, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                call_id = call.id or call_id
                arguments += call.function.arguments or ""
    return call_id, arguments, usage


def test_anthropic(agent_daemon: Daemon) -> None:
    from anthropic import Anthropic

    with agent_daemon as daemon, Anthropic(base_url=daemon.url, api_key="none") as client:
        tools: Any = [{"name": "get_weather", "description": "It tells.", "input_schema": SCHEMA}]
        messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        for turn in range(TURNS):
            asked: Any = {"model": "m", "max_tokens": 64, "messages": messages, "tools": tools}
            if turn % 2:
                with client.messages.stream(**asked) as stream:
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(**asked)
            assert reply.stop_reason == "tool_use"
            (call,) = [block for block in reply.content if block.type == "tool_use"]
            assert call.input == {"city": "Paris"}
            if turn:
                assert reply.usage.input_tokens <= NEW_TOKENS_MAX
            said = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
            answer = {"type": "tool_result", "tool_use_id": call.id, "content": f"Sun {turn}."}
            messages.append({"role": "assistant", "content": [said]})
            messages.append({"role": "user", "content": [answer]})
        assert requests.get(f"{daemon.url}/health", timeout=10).ok
