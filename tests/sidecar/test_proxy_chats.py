"""What the proxy reads of chats in the shapes of Anthropic and of OpenAI Responses."""

from __future__ import annotations

from typing import Any

import pytest

from towerd.api.proxy.chat import NotText, from_messages, from_responses, has_media

# --- headers ------------------------------------------------------------------------------


def test_messages_as_a_chat() -> None:
    """Anthropic's blocks become messages, tool calls and tool results."""
    body = {
        "model": "x", "max_tokens": 5, "stream": True,
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1",
                     "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "dog"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
            {"role": "assistant"},
        ],
        "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    }  # fmt: skip
    assert from_messages(body) == {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Let me look."}],
                "tool_calls": [
                    {"id": "t1", "type": "function",
                     "function": {"name": "look", "arguments": '{"at":"é"}'}}
                ],
                "reasoning_content": "hm",
            },
            {"role": "user", "content": [{"type": "text", "text": "And?"}]},
            {"role": "tool", "tool_call_id": "t1", "content": "a dog"},
        ],
        "tools": [
            {"type": "function",
             "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required",
    }  # fmt: skip


def test_responses_as_a_chat() -> None:
    """OpenAI's items become messages; items of one assistant turn become one message."""
    body = {
        "instructions": "Be kind.", "temperature": 0, "reasoning": {"effort": "low"},
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
            {"type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me look."}]},
            {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t1", "output": "a dog"},
            {"role": "user", "type": "message", "content": [{"type": "input_text", "text": "?"}]},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": {}}, {"type": "web_search"}],
    }  # fmt: skip
    found = from_responses(body)
    assert found["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"text": "Hi", "type": "text"}]},
        {
            "role": "assistant",
            "content": [{"text": "Let me look.", "type": "text"}],
            "reasoning_content": "hm",
            "tool_calls": [
                {"function": {"arguments": "{}", "name": "look"}, "id": "t1", "type": "function"}
            ],
        },
        {"content": "a dog", "role": "tool", "tool_call_id": "t1"},
        {"role": "user", "content": [{"text": "?", "type": "text"}]},
    ]
    assert found["tools"] == [
        {"type": "function", "function": {"name": "look", "parameters": {}, "strict": True}}
    ]
    assert found["reasoning_effort"] == "low"
    assert found["temperature"] == 0


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "source": {"type": "base64", "data": ""}}],
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
        "no list",
        7,
    ],
)
def test_more_than_text_in_messages(content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    if isinstance(content, list):
        with pytest.raises(NotText):
            from_messages({"messages": messages})
    else:
        assert from_messages({"messages": messages}) == {"messages": messages}
    wrongs: list[Any] = [None, "x", [1], {}]
    for wrong in wrongs:
        with pytest.raises(NotText):
            from_messages({"messages": wrong})


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
        {"type": "function_call_output", "call_id": "t", "output": [{"type": "input_image"}]},
        {"type": "computer_call"},
        {},
        {"role": "user", "content": 5},
    ],
)
def test_more_than_text_in_responses(item: dict[str, Any]) -> None:
    with pytest.raises(NotText):
        from_responses({"input": [item]})
    with pytest.raises(NotText):
        from_responses({"input": None})


def test_media_in_chats() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert not has_media([text, {"role": "user", "content": "b"}, {"role": "assistant"}])
    assert has_media([text, image])
    assert not has_media("no list")


# --- metrics ------------------------------------------------------------------------------
