"""Converts Anthropic's and OpenAI's newer requests to chat requests, as llama-server does.

This only serves to find the tokens that such a request will be evaluated as: the request itself is
forwarded. If llama-server reads one differently, only reuse is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Json = dict[str, Any]


class NotText(Exception):
    """The request contains more than text, or has an unknown form."""


def has_media(messages: Any) -> bool:
    """Whether a chat request's messages contain images, audio or the like."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(_type(part) != "text" for part in content):
            return True
    return False


def from_messages(body: Mapping[str, Any]) -> Json:
    """The chat request equivalent to a POST /v1/messages. Raises NotText."""
    messages: list[Json] = []
    if body.get("system") is not None:
        messages.append({"role": "system", "content": _system(body["system"])})
    for message in _objects(body.get("messages")):
        messages += _anthropic_message(message)
    out: Json = {"messages": messages}
    if isinstance(body.get("tools"), list):
        out["tools"] = [_anthropic_tool(tool) for tool in _objects(body["tools"])]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "tool"):
        out["tool_choice"] = "auto" if choice["type"] == "auto" else "required"
    if "chat_template_kwargs" in body:
        out["chat_template_kwargs"] = body["chat_template_kwargs"]
    return out


def _system(value: Any) -> str:
    if isinstance(value, str):
        return value
    texts = [block.get("text") for block in _objects(value) if _type(block) == "text"]
    return "".join(text for text in texts if isinstance(text, str))


def _anthropic_message(message: Json) -> list[Json]:
    content = message.get("content")
    if not isinstance(content, list):
        is_empty = "content" not in message and message.get("role") == "assistant"
        return [] if is_empty else [message]
    texts: list[Json] = []
    calls: list[Json] = []
    results: list[Json] = []
    reasoning = ""
    for block in _objects(content):
        kind = _type(block)
        if kind == "text":
            texts.append(block)
        elif kind == "thinking":
            reasoning += _text(block, "thinking")
        elif kind == "tool_use":
            calls.append(_tool_use(block))
        elif kind == "tool_result":
            results.append(_tool_result(block))
        elif kind == "image":
            raise NotText
    out: list[Json] = []
    if texts or calls or reasoning:
        converted: Json = {"role": message.get("role", ""), "content": texts or ""}
        if calls:
            converted["tool_calls"] = calls
        if reasoning:
            converted["reasoning_content"] = reasoning
        out.append(converted)
    return out + results


def _tool_use(block: Json) -> Json:
    arguments = msgspec.json.encode(block.get("input", {})).decode()
    return {
        "id": _text(block, "id"),
        "type": "function",
        "function": {"name": _text(block, "name"), "arguments": arguments},
    }


def _tool_result(block: Json) -> Json:
    content = block.get("content")
    if isinstance(content, list):
        if any(_type(part) == "image" for part in content):
            raise NotText
        content = "".join(_text(part, "text") for part in content if _type(part) == "text")
    if not isinstance(content, str):
        content = ""
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id"), "content": content}


def _anthropic_tool(tool: Json) -> Json:
    function = {
        "name": _text(tool, "name"),
        "description": _text(tool, "description"),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def from_responses(body: Mapping[str, Any]) -> Json:
    """The chat request equivalent to a POST /v1/responses. Raises NotText."""
    out = {k: v for k, v in body.items() if k not in ("input", "instructions", "tools")}
    messages: list[Json] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": body["instructions"] or ""})
    asked = body.get("input")
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    else:
        for item in _objects(asked):
            _add_item(messages, item)
    out["messages"] = messages
    tools = [
        _responses_tool(t) for t in _objects(body.get("tools") or []) if _type(t) == "function"
    ]
    if tools:
        out["tools"] = tools
    reasoning = out.pop("reasoning", None)
    if isinstance(reasoning, dict) and "effort" in reasoning:
        out["reasoning_effort"] = reasoning["effort"]
    return out


def _responses_tool(tool: Json) -> Json:
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": {**function, "strict": tool.get("strict", True)}}


def _add_item(messages: list[Json], item: Json) -> None:
    """Append an input item, or merge it into the assistant's message that it continues."""
    kind, role = _type(item), item.get("role")
    last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if role in ("user", "system", "developer"):
        rest = {k: v for k, v in item.items() if k not in ("type", "status")}
        messages.append({**rest, "content": _texts(item.get("content"))})
    elif role == "assistant" and kind == "message":
        if last is None:
            messages.append({"role": role, "content": _texts(item.get("content"))})
        elif isinstance(last.get("content"), list):
            last["content"] += _texts(item.get("content"))
        else:
            last["content"] = _texts(item.get("content"))
    elif kind == "function_call":
        if last is None:
            last = {"role": "assistant"}
            messages.append(last)
        last.setdefault("tool_calls", []).append(_function_call(item))
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else _texts(output)
        messages.append({"content": content, "role": "tool", "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        parts = _objects(item.get("content"))
        text = _text(parts[0], "text") if parts else ""
        if last is None:
            last = {"role": "assistant", "content": []}
            messages.append(last)
        last["reasoning_content"] = text
    else:
        raise NotText


def _function_call(item: Json) -> Json:
    function = {"arguments": _text(item, "arguments"), "name": _text(item, "name")}
    return {"function": function, "id": _text(item, "call_id"), "type": "function"}


def _texts(content: Any) -> list[Json]:
    """Convert content parts to those of a chat request."""
    if isinstance(content, str):
        return [{"text": content, "type": "text"}]
    out: list[Json] = []
    for part in _objects(content):
        if _type(part) not in ("input_text", "output_text"):
            raise NotText
        out.append({"text": _text(part, "text"), "type": "text"})
    return out


def _objects(value: Any) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise NotText
    return value


def _type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def _text(block: Json, name: str) -> str:
    value = block.get(name)
    return value if isinstance(value, str) else ""
