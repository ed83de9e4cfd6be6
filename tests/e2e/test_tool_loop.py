"""Twenty turns of an agent that calls a tool in each, through the packages that agents use: every
turn evaluates what comes after the call and no more, although the clients send the calls back in
JSON of their own, and some of them leave out the thinking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from daemon import Daemon
from llama_wire import TEMPLATES
from scripted_model import make_scripted_model
from tool_callers import FAMILIES, TOOL, Family
from waiting import until

TURNS = 20
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": TOOL, "description": "It tells.", "parameters": SCHEMA}
QUESTION = {"role": "user", "content": "How is the weather?"}


@dataclass(frozen=True)
class Agent:
    """A daemon whose model calls the tool whatever it is told."""

    daemon: Daemon
    family: Family
    counted: dict[int, int] = field(default_factory=dict)

    def new_tokens(self, turn: int) -> int:
        """Tokens of a prompt behind the call of its last turn: the tool's answer, and what the
        template puts around it."""
        like = turn if turn < 2 else 2 if turn < 10 else 12  # as long
        if like not in self.counted:
            self.counted[like] = self._new_tokens(like)
        return self.counted[like]

    def _new_tokens(self, turn: int) -> int:
        call = {"name": TOOL, "arguments": '{"city": "Paris"}'}
        calls = [{"id": "123456789", "type": "function", "function": call}]
        messages: list[Any] = [QUESTION]
        for i in range(max(turn - 1, 0), turn + 1):
            answer = {"role": "tool", "tool_call_id": "123456789", "content": f"Sun {i}."}
            messages += [{"role": "assistant", "content": "", "tool_calls": calls}, answer]
        body = {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        prompt = self.daemon.post("/apply-template", body)["prompt"]
        before = messages[-3]["content"]
        last = "Paris" if self.family.is_rendered else before
        rest = prompt[prompt.rindex(last) + len(last) :]
        asked = {"content": rest, "add_special": False, "parse_special": True}
        return len(self.daemon.post("/tokenize", asked)["tokens"])

    def n_ahead(self) -> int:
        """Tokens that were evaluated before they were asked for."""
        traffic = self.daemon.get("/towerd/v1/stats")["traffic"]
        return int(traffic["anticipated_tokens"]) if self.family.ahead else 0

    def wait_ahead(self, before: int) -> None:
        """Wait until what the template renders otherwise than it was generated is evaluated."""
        if self.family.ahead:
            until(lambda: self.n_ahead() > before)


@pytest.fixture(scope="module", params=list(FAMILIES))
def agent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Agent]:
    family = FAMILIES[request.param]
    root = tmp_path_factory.mktemp("agent")
    make_scripted_model(root / "scripted.gguf", family.script)
    template = TEMPLATES / f"{request.param}.jinja"
    flags = [
        "-m",
        str(root / "scripted.gguf"),
        "--ctx-size",
        "8192",
        "--threads",
        "1",
        "--chat-template-file",
        str(template),
    ]
    if not family.ahead:
        flags.append("--no-anticipate")
    with Daemon(root / "d", *flags) as daemon:
        yield Agent(daemon, family)
        assert requests.get(f"{daemon.url}/health", timeout=10).ok


def test_openai(agent: Agent) -> None:
    """The thinking is not sent back."""
    from openai import OpenAI

    with OpenAI(base_url=f"{agent.daemon.url}/v1", api_key="none") as client:
        tools: Any = [{"type": "function", "function": FUNCTION}]
        messages: list[Any] = [QUESTION]
        for turn in range(TURNS):
            before = agent.n_ahead()
            if turn % 2:
                call_id, arguments, said, usage = streamed(client, messages, tools)
            else:
                reply = client.chat.completions.create(
                    model="m", messages=messages, tools=tools, temperature=0
                )
                message: Any = reply.choices[0].message
                (call,) = message.tool_calls
                assert reply.choices[0].finish_reason == "tool_calls"
                call_id, arguments, usage = call.id, call.function.arguments, reply.usage
                said = message.content
            assert json.loads(arguments) == {"city": "Paris"}
            cached = usage.prompt_tokens_details.cached_tokens
            if turn:
                assert usage.prompt_tokens - cached <= agent.new_tokens(turn - 1)
            sent = json.dumps(json.loads(arguments), indent=2)
            calls = [
                {"id": call_id, "type": "function", "function": {"name": TOOL, "arguments": sent}}
            ]
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": f"Sun {turn}."})
            agent.wait_ahead(before)


def streamed(client: Any, messages: list[Any], tools: Any) -> tuple[str, str, str, Any]:
    """The id and the arguments of the call in a streamed reply, its text, and its usage."""
    call_id, arguments, said, usage = "", "", "", None
    stream = client.chat.completions.create(
        model="m",
        messages=messages,
        tools=tools,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                call_id = call.id or call_id
                arguments += call.function.arguments or ""
    return call_id, arguments, said, usage


def test_anthropic(agent: Agent) -> None:
    """What was said is sent back whole, with the thinking."""
    from anthropic import Anthropic

    with Anthropic(base_url=agent.daemon.url, api_key="none") as client:
        tools: Any = [{"name": TOOL, "description": "It tells.", "input_schema": SCHEMA}]
        messages: list[Any] = [{"role": "user", "content": "Is it raining?"}]
        for turn in range(TURNS):
            before = agent.n_ahead()
            asked: Any = {
                "model": "m",
                "max_tokens": 64,
                "messages": messages,
                "tools": tools,
                "extra_body": {"temperature": 0},
            }
            if turn % 2:
                with client.messages.stream(**asked) as stream:
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(**asked)
            assert reply.stop_reason == "tool_use"
            *_, call = reply.content
            assert call.type == "tool_use"
            assert call.input == {"city": "Paris"}
            if turn:
                assert reply.usage.input_tokens <= agent.new_tokens(turn - 1)
            answer = {"type": "tool_result", "tool_use_id": call.id, "content": f"Sun {turn}."}
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": [answer]})
            agent.wait_ahead(before)
