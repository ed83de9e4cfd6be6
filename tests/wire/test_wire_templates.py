"""Chat templates: towerd.wire renders what llama-server renders, and refuses what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from llama_wire import PATHS, TEMPLATES, LlamaServer, Talker, answer, plain, running_server

from towerd.wire import Model

NAMES = (
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "openai-gpt-oss-120b",
    "google-gemma-4-31B-it",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "LFM2-8B-A1B",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paints the house.",
        "parameters": {
            "type": "object",
            "properties": {"color": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["color"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "paint", "arguments": '{"color":"red"}'},
}
USER = {"role": "user", "content": "Tell me a story."}
CHATS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [USER]},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "Once upon a time."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "More"}, {"type": "text", "text": "!"}],
            },
        ]
    },
    "a tool's answer": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "paint", "content": "done"},
        ],
        "tools": [TOOL],
    },
    "thinking": {
        "messages": [
            USER,
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
            {"role": "user", "content": "And?"},
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "a begun reply": {"messages": [USER, {"role": "assistant", "content": "Once"}]},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
}


@dataclass(frozen=True)
class Both:
    """One template on either side."""

    server: LlamaServer
    model: Model


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest, story: Talker) -> Iterator[Both]:
    path = TEMPLATES / f"{request.param}.jinja"
    model = story.model(chat_template=path.read_text(), defaults={"cache_prompt": False})
    with running_server("--chat-template-file", str(path)) as server:
        yield Both(server, model)


@pytest.mark.parametrize("name", CHATS)
def test_prompt(both: Both, story: Talker, name: str) -> None:
    """The rendered text, or the refusal of a template that cannot."""
    body = json.dumps(CHATS[name]).encode()
    theirs = both.server.post("/apply-template", body)
    if theirs.status == 200:
        assert json.loads(both.model.apply_template(body)) == json.loads(theirs.body)
        counted = both.server.post("/v1/chat/completions/input_tokens", body)
        assert json.loads(both.model.count_tokens("chat", body)) == json.loads(counted.body)
    else:
        ours = answer(story, both.model, "chat", body)
        assert (ours.status, message(ours.body)) == (400, message(theirs.body))


def test_thinking_budget(both: Both, story: Talker) -> None:
    """Thinking that is cut short by its budget, or a model that does not think."""
    body = json.dumps(
        {"messages": [USER], "max_tokens": 40, "temperature": 0, "thinking_budget_tokens": 5}
    ).encode()
    theirs = both.server.post(PATHS["chat"], body)
    ours = answer(story, both.model, "chat", body)
    assert ours.status == theirs.status
    assert plain(json.loads(ours.body)) == plain(json.loads(theirs.body))


def message(body: bytes) -> str:
    """The message of an error."""
    return str(json.loads(body)["error"]["message"])


@pytest.mark.parametrize(
    ("sent", "rendered"),
    [
        ('{"a":"b: c, d","n":[1.10,2]}', '{"a": "b: c, d", "n": [1.10, 2]}'),
        ('{\n  "a" : "\\u00e9 \\"x\\"\\n"\n}', '{"a": "é \\"x\\"\\n"}'),
        ("{}", "{}"),
        ("", "{}"),
        ("no json", "no json"),
    ],
)
def test_arguments_have_one_spelling(story: Talker, sent: str, rendered: str) -> None:
    """What a template that takes arguments as text gets, however the client spelled them; text that
    is no JSON as it is."""
    template = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
    call = CALL | {"function": {"name": "paint", "arguments": sent}}
    body = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]}
    model = story.model(chat_template=template)
    prompt = json.loads(model.apply_template(json.dumps(body).encode()))["prompt"]
    assert prompt.split("|")[1] == rendered
