"""The `messages` and `tools` of a chat request, checked and brought into one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from towerd.errors import InvalidRequest, NotSupported

_MEDIA = frozenset({"image_url", "input_image", "image", "input_audio", "input_video", "video_url",
                    "file"})  # fmt: skip

Message = dict[str, Any]


def parse_messages(messages: Any) -> list[Message]:
    """Messages with exactly the keys that templates may rely on.

    `role` and `content` (text, or a list of text parts) are always there; `reasoning_content`,
    `name`, `tool_call_id` and `tool_calls` (arguments as JSON text) where given. Other keys are
    dropped, as in llama-server. Raises InvalidRequest naming index and field; NotSupported for
    media."""
    if messages is None:
        raise InvalidRequest("'messages' is required.")
    if not isinstance(messages, list):
        raise InvalidRequest("'messages' must be an array.")
    return [_message(m, i) for i, m in enumerate(messages)]


def parse_tools(tools: Any) -> list[dict[str, Any]]:
    """Function tools with name, description and parameters. Raises InvalidRequest."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequest("'tools' must be an array.")
    return [_tool(t, f"tools[{i}]") for i, t in enumerate(tools)]


def wants_continuation(body: Mapping[str, Any], messages: list[Message]) -> Message | None:
    """The begun assistant message that the model shall continue, if the request means that.

    It does with `continue_final_message`, or when the last message is the assistant's.
    Raises InvalidRequest for contradictions, as llama-server does."""
    asked = body.get("continue_final_message")
    explicit = asked is True or asked in ("content", "reasoning_content")
    last = messages[-1] if messages else None
    if last is None or not (explicit or last["role"] == "assistant"):
        return None
    if explicit:
        if body.get("add_generation_prompt", True) is not False:
            raise InvalidRequest(
                "Cannot set both add_generation_prompt and continue_final_message to true."
            )
    elif len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise InvalidRequest("Cannot have 2 or more assistant messages at the end of the list.")
    if last["role"] == "assistant" and "tool_calls" in last:
        raise InvalidRequest("Cannot continue an assistant message that contains tool calls.")
    return last


def _message(message: Any, i: int) -> Message:
    if type(message) is dict and len(message) == 2:  # as nearly all of a long chat
        role, content = message.get("role"), message.get("content")
        if type(role) is type(content) is str:
            return {"role": role, "content": content}
    where = f"messages[{i}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object.")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role must be a string.")
    if "content" not in message and not (role == "assistant" and "tool_calls" in message):
        needs = "content or tool_calls" if role == "assistant" else "content"
        raise InvalidRequest(f"{where} must have {needs}.")
    out: Message = {"role": role, "content": _content(message.get("content"), where)}
    for key in ("reasoning_content", "name", "tool_call_id"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"{where}.{key} must be a string.")
        if value:
            out[key] = value
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be an array.")
    if calls:
        out["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return out


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string, an array of parts or null.")
    return [_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)] or ""


def _part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type.")
    if kind in _MEDIA:
        raise NotSupported(
            f"{where}: {kind} input is not supported by the embedded engine; the llama-server "
            "engine with a multimodal model takes it."
        )
    if kind != "text":
        raise InvalidRequest(f"{where}.type {kind[:40]!r} is not supported.")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string.")
    return {"type": "text", "text": part["text"]}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise InvalidRequest(f"{where} must be an object of type function.")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must have a name.")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str) and call["id"]:
        out["id"] = call["id"]
    return out


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(f"{where} must be an object of type function.")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must have a name.")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise InvalidRequest(f"{where}.function.description must be a string.")
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": description,
            "parameters": function.get("parameters") or {},
        },
    }
