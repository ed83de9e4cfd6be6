"""Tool calls and thinking in the formats of several templates: a model that says them, and the same
bytes from towerd.wire and llama-server in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from llama_wire import PATHS, TEMPLATES, LlamaServer, Talker, answer, events, plain, running_server
from scripted_model import make_scripted_model

from towerd.wire import Model, Reply, Request, Writer

SCRIPTS = {
    "Qwen-Qwen3-0.6B": [
        "<think>", "\nHe", " needs", " red.", "\n</think>\n\n", "I'll", " do", " it.", "<tool_call>", '\n{"name": ',
        '"paint"', ', "arguments": ', '{"color"', ': "r', 'ed"', "}}", "\n</tool_call>",
    ],
    "Qwen3-Coder": [
        "Well", ".", "<tool_call>", "\n<function=", "paint", ">\n", "<parameter=", "color>\n", "red", "\n</parameter>",
        "\n</function>", "\n</tool_call>",
    ],
    "openai-gpt-oss-120b": [
        "<|channel|>", "commentary", " to=", "functions", ".", "paint", " json", "<|message|>", '{"color":', '"red"}',
    ],
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": [
        "<tool_call>", '\n{"name": ', '"paint"', ', "arguments": ', '{"color": ', '"blue"', "}}", "\n</tool_call>",
    ],
}  # fmt: skip
TOOL = {
    "name": "paint",
    "description": "Paints the house.",
    "parameters": {
        "type": "object",
        "properties": {"color": {"type": "string", "enum": ["red", "blue"]}},
        "required": ["color"],
    },
}
ANTHROPIC = {
    "name": TOOL["name"],
    "description": TOOL["description"],
    "input_schema": TOOL["parameters"],
}
USER = {"role": "user", "content": "Paint my house."}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]},
    "responses": {"input": "Paint my house.", "tools": [{"type": "function", **TOOL}]},
    "messages": {"messages": [USER], "tools": [ANTHROPIC]},
}


@dataclass(frozen=True)
class Both:
    """One scripted model on either side."""

    server: LlamaServer
    talker: Talker
    model: Model


@pytest.fixture(scope="module", params=SCRIPTS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    template = TEMPLATES / f"{request.param}.jinja"
    path = tmp_path_factory.mktemp("scripted") / "model.gguf"
    make_scripted_model(path, SCRIPTS[request.param])
    talker = Talker(path)
    model = talker.model(chat_template=template.read_text(), defaults={"cache_prompt": False})
    with running_server("--chat-template-file", str(template), path=path) as server:
        yield Both(server, talker, model)
    talker.close()


@pytest.mark.parametrize("endpoint", REQUESTS)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(both: Both, endpoint: Any, choice: str, stream: bool) -> None:
    """One event for each token, whose deltas are thinking, text, the call's name and its arguments;
    or the whole reply."""
    wanted: Any = {"type": "any" if choice == "required" else choice}
    body = REQUESTS[endpoint] | {
        "max_tokens": 100,
        "temperature": 0,
        "stream": stream,
        "tool_choice": wanted if endpoint == "messages" else choice,
    }
    data = json.dumps(body).encode()
    theirs = both.server.post(PATHS[endpoint], data)
    ours = answer(both.talker, both.model, endpoint, data)
    assert ours.status == theirs.status == 200
    if stream:
        assert plain(events(ours.body)) == plain(events(theirs.body))
    else:
        assert plain(json.loads(ours.body)) == plain(json.loads(theirs.body))
    assert b"paint" in ours.body


def test_next_prompt(both: Both) -> None:
    """The anticipated tokens are a prefix of the next request, whatever the tool answers."""
    body = REQUESTS["chat"] | {"max_tokens": 100, "temperature": 0}
    request = Request(both.model, "chat", json.dumps(body).encode())
    reply, writer = Reply(request, 0), Writer(request)
    for chunk in both.talker.chunks(request, reply):
        writer.partial(chunk)
    writer.final(reply, 0, 0, b"")
    message = json.loads(writer.message(0))
    assert message["tool_calls"][0]["function"]["name"] == "paint"
    ready = request.next_prompt(json.dumps(message).encode()).tolist()
    message.pop("reasoning_content", None)
    for content in ("Done.", "It is red now."):
        result = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": content,
        }
        following = body | {"messages": [USER, message, result]}
        ids = Request(both.model, "chat", json.dumps(following).encode()).prompts[0].tolist()
        assert ids[: len(ready)] == ready
        assert len(ids) - len(ready) < 100
    assert len(ready) > len(request.prompts[0])
