"""Ollama's messages as OpenAI's: pictures in parts, calls whose arguments are texts, results with ids."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from typing import Any

from towerd.api.http import fields
from towerd.api.http.media_type import media_type_of
from towerd.api.http.reply import encode
from towerd.errors import InvalidRequest

Message = dict[str, Any]


def chat_messages(value: Any) -> list[Message]:
    """The messages of a chat. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise fields.wrong_type("messages", "array", value)
    ids = CallIds()
    return [_message(f"messages[{i}]", each, ids) for i, each in enumerate(value)]


class CallIds:
    """Ids of calls and of their results, where a client leaves them out: its results are in the order of the
    calls, or name the tool."""

    def __init__(self) -> None:
        self._n_calls = 0
        self._is_over = False
        """Whether another message follows the calls: the next call is of a new turn."""
        self._waiting: set[str] = set()
        """Ids of this turn's calls that have no result yet."""
        self._in_order: deque[str] = deque()
        """Of all calls of the turn, the answered ones among them until they are met."""
        self._of_tool: dict[str, deque[str]] = {}

    def end_calls(self) -> None:
        """The calls are complete. When others begin, those without a result get none any more."""
        self._is_over = True

    def of_call(self, given: str, tool: str) -> str:
        """The id of the next call. Some templates want nine letters and digits."""
        if self._is_over:
            self._is_over = False
            self._waiting, self._in_order, self._of_tool = set(), deque(), {}
        self._n_calls += 1
        found = given or f"call{self._n_calls:05d}"
        self._waiting.add(found)
        self._in_order.append(found)
        self._of_tool.setdefault(tool, deque()).append(found)
        return found

    def of_result(self, given: str, tool: str) -> str:
        """The id of the call whose result this is; empty: there is none."""
        found = given or self._next(self._of_tool.get(tool)) or self._next(self._in_order)
        self._waiting.discard(found)
        return found

    def _next(self, ids: deque[str] | None) -> str:
        """The first that waits; empty: none does."""
        while ids and ids[0] not in self._waiting:
            ids.popleft()
        return ids[0] if ids else ""


def with_pictures(text: str, pictures: Any, where: str) -> str | list[Message]:
    """The content of a message: its text, after the pictures in `pictures` if there are any. Raises
    InvalidRequest."""
    if not pictures:
        return text
    if not isinstance(pictures, list):
        raise fields.wrong_type(where, "array", pictures)
    parts = [_picture(f"{where}[{i}]", each) for i, each in enumerate(pictures)]
    return [*parts, *([{"type": "text", "text": text}] if text else [])]


def _message(where: str, value: Any, ids: CallIds) -> Message:
    if not isinstance(value, dict):
        raise fields.wrong_type(where, "object", value)
    role = _text(value, "role", where).lower()
    if not role:
        raise InvalidRequest(f"Field '{where}.role' is missing")
    text = _text(value, "content", where)
    message: Message = {
        "role": role,
        "content": with_pictures(text, value.get("images"), f"{where}.images"),
    }
    if thinking := _text(value, "thinking", where):
        message["reasoning_content"] = thinking
    if calls := value.get("tool_calls"):
        if not isinstance(calls, list):
            raise fields.wrong_type(f"{where}.tool_calls", "array", calls)
        message["tool_calls"] = [
            _call(f"{where}.tool_calls[{i}]", each, ids) for i, each in enumerate(calls)
        ]
    if role != "assistant":
        ids.end_calls()
    if role == "tool":
        tool = _text(value, "tool_name", where) or _text(value, "name", where)
        call_id = ids.of_result(_text(value, "tool_call_id", where), tool)
        message |= {"tool_call_id": call_id} if call_id else {}
        message |= {"name": tool} if tool else {}
    return message


def _call(where: str, value: Any, ids: CallIds) -> Message:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"Field '{where}.function' is missing")
    name = _text(function, "name", f"{where}.function")
    arguments = function.get("arguments")
    return {
        "id": ids.of_call(_text(value, "id", where), name),
        "type": "function",
        "function": {
            "name": name,
            "arguments": arguments
            if isinstance(arguments, str)
            else encode(arguments or {}).decode(),
        },
    }


def _picture(where: str, value: Any) -> Message:
    if not isinstance(value, str):
        raise fields.wrong_type(where, "string", value)
    value = value.replace("\n", "").replace("\r", "")  # Go's decoder passes over them
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"Field '{where}' is not base64: {error}") from error
    kind = media_type_of(data)
    if kind is None or not kind.startswith("image/"):
        raise InvalidRequest(f"Field '{where}' is not a picture in a known format")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{value}"}}


def _text(fields_of: Message, name: str, where: str) -> str:
    value = fields_of.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise fields.wrong_type(f"{where}.{name}", "string", value)
    return value
