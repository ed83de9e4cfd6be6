"""Extracts what towerd must know of a forwarded reply: its text, its timings, its end.

llama-server has five reply dialects. Each has a decoder here that reads only the few fields needed
and ignores the rest.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from towerd.engine.base import StopType, Timings


class Dialect(enum.Enum):
    """The shapes of llama-server's replies."""

    NATIVE = "native"
    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


class _Timings(Struct):
    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


class _Cached(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    """OpenAI's two usages and Anthropic's in one."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens_details: _Cached | None = None


class _NativeReply(Struct):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    timings: _Timings | None = None
    error: Any = None


class _Message(Struct):
    content: str | None = None


class _Choice(Struct):
    finish_reason: str | None = None
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None


class _OpenAI(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


class _Part(Struct):
    text: str = ""


class _Item(Struct):
    type: str = ""
    content: list[_Part] = []


class _Response(Struct):
    output: list[_Item] = []
    usage: _Usage | None = None


class _Responses(Struct):
    """A streamed event, or the whole reply (`object` is then "response")."""

    type: str = ""
    object: str = ""
    delta: str = ""
    response: _Response | None = None
    output: list[_Item] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


class _Delta(Struct):
    text: str = ""
    stop_reason: str | None = None


class _Start(Struct):
    usage: _Usage | None = None


class _Messages(Struct):
    """A streamed event, or the whole reply (`type` is then "message")."""

    type: str = ""
    delta: _Delta | None = None
    message: _Start | None = None
    content: list[_Part] = []
    stop_reason: str | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODERS: dict[Dialect, msgspec.json.Decoder[Struct]] = {
    Dialect.NATIVE: msgspec.json.Decoder(_NativeReply),
    Dialect.COMPLETION: msgspec.json.Decoder(_OpenAI),
    Dialect.CHAT: msgspec.json.Decoder(_OpenAI),
    Dialect.RESPONSES: msgspec.json.Decoder(_Responses),
    Dialect.MESSAGES: msgspec.json.Decoder(_Messages),
}
_STOPS: dict[str, StopType] = {
    "eos": "eos",
    "word": "word",
    "limit": "limit",
    "length": "limit",
    "max_tokens": "limit",
}
_CALLS = frozenset({"tool_calls", "function_call", "tool_use"})
"""Finish reasons of OpenAI's and Anthropic's dialects for a tool call."""


@dataclass(slots=True)
class ReplyWatch:
    """What is known so far of one reply."""

    dialect: Dialect
    parts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    stop: StopType | None = None
    """Why generation ended; None while it continues."""
    calls_tools: bool = False
    """Whether it ended with a tool call."""
    failed: bool = False
    """The reply is an error, or ends with one."""
    cache_n: int | None = None
    n_prompt: int = 0
    n_predicted: int = 0
    timings: Timings | None = None

    @property
    def text(self) -> str:
        """The reply's visible text."""
        return "".join(self.parts)

    @property
    def is_over(self) -> bool:
        """Whether the reply's last part has begun."""
        return self.failed or self.stop is not None

    def see(self, document: bytes) -> None:
        """Process one event's data, or a whole reply. Undecodable data is ignored."""
        try:
            value = _DECODERS[self.dialect].decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if getattr(value, "error", None) is not None:
            self.failed = True
        elif isinstance(value, _NativeReply):
            self._native(value)
        elif isinstance(value, _OpenAI):
            self._openai(value)
        elif isinstance(value, _Responses):
            self._responses(value)
        elif isinstance(value, _Messages):
            self._messages(value)

    def final_timings(self) -> Timings:
        """llama-server's timings; for dialects without timings, only the counts."""
        if self.timings is not None:
            return self.timings
        cached = self.cache_n or 0
        return Timings(cached, max(self.n_prompt - cached, 0), 0.0, self.n_predicted, 0.0)

    def _native(self, value: _NativeReply) -> None:
        self.parts.append(value.content)
        self.ids += value.tokens
        self._time(value.timings)
        if value.stop:
            self._end(value.stop_type)

    def _openai(self, value: _OpenAI) -> None:
        for choice in value.choices:
            message = choice.delta or choice.message
            self.parts.append(choice.text or (message.content if message else None) or "")
            if choice.finish_reason is not None:
                self._end(choice.finish_reason)
        self._use(value.usage)
        self._time(value.timings)

    def _responses(self, value: _Responses) -> None:
        if value.type == "response.output_text.delta":
            self.parts.append(value.delta)
        elif value.type == "response.completed":
            self._use(value.response.usage if value.response else None)
            self._end("stop")
        elif value.object == "response":
            texts = [p.text for i in value.output if i.type == "message" for p in i.content]
            self.parts.extend(texts)
            self._use(value.usage)
            self._end("stop")
        self._time(value.timings)

    def _messages(self, value: _Messages) -> None:
        if value.type == "message_start" and value.message is not None:
            self._use(value.message.usage)
        elif value.type == "content_block_delta" and value.delta is not None:
            self.parts.append(value.delta.text)
        elif value.type == "message_delta" and value.delta is not None:
            self._use(value.usage)
            self._end(value.delta.stop_reason or "")
        elif value.type == "message":
            self.parts.extend(part.text for part in value.content)
            self._use(value.usage)
            self._end(value.stop_reason or "")

    def _end(self, word: str) -> None:
        self.stop = _STOPS.get(word, "eos")
        self.calls_tools = word in _CALLS

    def _time(self, found: _Timings | None) -> None:
        if found is not None:
            self.timings = Timings(
                found.cache_n,
                found.prompt_n,
                found.prompt_ms,
                found.predicted_n,
                found.predicted_ms,
            )
            self.cache_n = found.cache_n
            self.n_prompt = found.cache_n + found.prompt_n
            self.n_predicted = found.predicted_n

    def _use(self, usage: _Usage | None) -> None:
        if usage is None:
            return
        details = usage.prompt_tokens_details or usage.input_tokens_details
        if details is not None and details.cached_tokens is not None:
            self.cache_n = details.cached_tokens
        prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
        if usage.cache_read_input_tokens is not None:  # Anthropic counts these separately
            self.cache_n = usage.cache_read_input_tokens
            prompt = (prompt or 0) + self.cache_n
        if prompt is not None:
            self.n_prompt = prompt
        predicted = (
            usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
        )
        if predicted is not None:
            self.n_predicted = predicted


class EventSplitter:
    """Cuts a byte stream of server-sent events after each event."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """The bytes after the last complete event, as received."""
        self._tail = b""
        """The last of these bytes, with which a blank line may begin."""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each with its closing blank line. Every byte is
        scanned once, however long an event is."""
        if not self._parts and data.endswith(_END) and b"\r" not in data:
            if data.find(_END) == len(data) - len(_END):
                return [data]  # one whole event, as nearly all arrive
        n_tail, events, start = len(self._tail), [], 0
        text = self._tail + data
        for found in _BLANK_LINE.finditer(text):
            end = found.end() - n_tail
            events.append(b"".join([*self._parts, data[start:end]]))
            self._parts, start = [], end
        if start < len(data):
            self._parts.append(data[start:])
        self._tail = text[max(len(text) - _TAIL_BYTES, start + n_tail if events else 0) :]
        return events

    def rest(self) -> bytes:
        """The bytes after the last complete event."""
        return b"".join(self._parts)


_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_END = b"\n\n"
_TAIL_BYTES = len(b"\r\n\r")
_ONE_LINE = b"data: "
_DATA = re.compile(rb"^data:[ ]?([^\r\n]*)", re.MULTILINE)


def event_data(event: bytes) -> bytes:
    """The `data` of an event; empty if it has none, as in comments."""
    if event.startswith(_ONE_LINE) and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[len(_ONE_LINE) : -2]
    return b"\n".join(_DATA.findall(event))
