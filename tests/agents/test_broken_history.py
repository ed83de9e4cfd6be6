"""A call whose arguments were cut off, which its agent sends back: the model reads it as far as it came, and the
chat goes on. Tools that are wrong are refused once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_model import make_agent_model
from daemon import Daemon

TEMPLATE = Path(__file__).resolve().parents[2] / "towerd" / "data" / "templates" / "Qwen3.jinja"
CALL = json.dumps({"name": "read", "arguments": {"path": "notes.txt"}})
SCRIPT = ("<think>\nI", " read.\n</think>\n\n", "<tool_", "call>\n", CALL, "\n</tool_call>")
ANSWER = ("<think>\nNow", " I know.\n</think>\n\n", "Forty-", "two.")
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}


@pytest.fixture(scope="module", params=["embedded", "llama-server"])
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("broken")
    make_agent_model(root / "agent.gguf", SCRIPT, ANSWER)
    flags = ("-m", str(root / "agent.gguf"), "--ctx-size", "4096", "--threads", "1")
    template = ("--chat-template-file", str(TEMPLATE))
    with Daemon(root / "d", *flags, *template, "--engine", request.param) as daemon:
        yield daemon


@pytest.mark.parametrize("stream", [False, True])
def test_broken_call(daemon: Daemon, stream: bool) -> None:
    """The package, which repeats a request that failed with 500, asks once."""
    headers = {"X-Towerd-Session": f"broken-{stream}"}
    with openai.OpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", default_headers=headers
    ) as client:
        chats: Any = client.chat.completions
        messages: list[Any] = [{"role": "user", "content": "What do my notes say?"}]
        for _ in range(2):  # a call, then an answer: now the chat is known to continue
            reply = chats.create(model="m", messages=messages, tools=[TOOL])
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            for call in messages[-1].get("tool_calls", []):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "42."})
        assert messages[-1]["content"] == "Forty-two."
        messages.append({"role": "user", "content": "And once more?"})
        whole, broken = messages[1], json.loads(json.dumps(messages[1]))
        broken["tool_calls"][0]["function"]["arguments"] = '{"path": "no'
        before = daemon.statuses()
        for call in (broken, whole):
            asked = {"messages": [*messages, call, messages[2]], "tools": [TOOL]}
            reply = chats.create(model="m", **asked, stream=stream)
            if stream:
                said = "".join(
                    chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices
                )
            else:
                said = reply.choices[0].message.content
            assert said == "Forty-two."
        with pytest.raises(openai.BadRequestError, match="Failed to parse tool"):
            chats.create(model="m", messages=messages, tools=[{"type": "function"}], stream=stream)
        assert daemon.statuses() - before == {"200": 2, "400": 1}
