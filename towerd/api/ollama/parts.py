"""Reading replies of our routes: what a part of one says, whichever route it is of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """What an event, or a whole reply, says."""

    text: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    """Whole calls of tools, in Ollama's shape."""
    logprobs: tuple[Any, ...] = ()
    done_reason: str = ""
    """Why the reply ended; empty: it has not."""
    timings: Mapping[str, Any] = field(default_factory=dict)
    towerd: Any = None
    """What only our replies say."""

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)


class PartReader(ABC):
    """Reads one reply."""

    def __init__(self, *, has_alternatives: bool = True) -> None:
        """has_alternatives: whether its tokens are passed on with others that were likely."""
        self._has_alternatives = has_alternatives

    def _logprobs(self, tokens: Iterable[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
        if self._has_alternatives:
            return tuple(tokens or ())
        return tuple(
            {key: value for key, value in each.items() if key != "top_logprobs"}
            for each in tokens or ()
        )

    @abstractmethod
    def of_event(self, event: dict[str, Any]) -> ReplyPart:
        """An event of a stream."""

    @abstractmethod
    def of_whole(self, reply: dict[str, Any]) -> ReplyPart:
        """A reply that was not streamed."""


class ChatReader(PartReader):
    """OpenAI's chat completions. Calls of tools come in pieces, and are passed on when they are whole."""

    def __init__(self, *, has_alternatives: bool = True) -> None:
        super().__init__(has_alternatives=has_alternatives)
        self._calls: list[_CallPieces] = []
        self._n_read = 0

    def of_event(self, event: dict[str, Any]) -> ReplyPart:
        choices: list[dict[str, Any]] = event.get("choices") or [{}]
        choice = choices[0]
        delta = choice.get("delta") or {}
        reason = choice.get("finish_reason")
        for piece in delta.get("tool_calls") or ():
            self._add(piece)
        return self._part(event, choice, delta, self._whole_calls(is_over=reason is not None))

    def of_whole(self, reply: dict[str, Any]) -> ReplyPart:
        (choice,) = reply["choices"]
        message = choice["message"]
        for i, call in enumerate(message.get("tool_calls") or ()):
            self._add({"index": i} | call)
        return self._part(reply, choice, message, self._whole_calls(is_over=True))

    def _part(
        self,
        event: dict[str, Any],
        choice: dict[str, Any],
        said: dict[str, Any],
        calls: tuple[dict[str, Any], ...],
    ) -> ReplyPart:
        reason = choice.get("finish_reason")
        return ReplyPart(
            said.get("content") or "",
            said.get("reasoning_content") or "",
            calls,
            self._logprobs((choice.get("logprobs") or {}).get("content")),
            "" if reason is None else "length" if reason == "length" else "stop",
            event.get("timings") or {},
            event.get("towerd"),
        )

    def _add(self, piece: dict[str, Any]) -> None:
        index = piece.get("index", 0)
        while len(self._calls) <= index:
            self._calls.append(_CallPieces())
        self._calls[index].add(piece)

    def _whole_calls(self, *, is_over: bool) -> tuple[dict[str, Any], ...]:
        """Those not told yet that are complete: behind each but the last another one has begun."""
        end = len(self._calls) if is_over else max(self._n_read, len(self._calls) - 1)
        begin, self._n_read = self._n_read, end
        found = [self._calls[i].call(i) for i in range(begin, end)]
        return tuple(each for each in found if each is not None)


class _CallPieces:
    """A call of a tool that arrives in pieces."""

    def __init__(self) -> None:
        self._id = self._name = ""
        self._arguments: list[str] = []

    def add(self, piece: dict[str, Any]) -> None:
        function = piece.get("function") or {}
        self._id = piece.get("id") or self._id
        self._name = function.get("name") or self._name
        self._arguments.append(function.get("arguments") or "")

    def call(self, index: int) -> dict[str, Any] | None:
        """The call as Ollama says it; None if its arguments were cut off: no one may make it then."""
        text = "".join(self._arguments)
        try:
            arguments = msgspec.json.decode(text) if text.strip() else {}
        except msgspec.DecodeError:
            return None
        if not isinstance(arguments, dict):
            return None
        function = {"index": index, "name": self._name, "arguments": arguments}
        return {"id": self._id, "function": function}


class TextReader(PartReader):
    """llama-server's completions and infills."""

    def of_event(self, event: dict[str, Any]) -> ReplyPart:
        return ReplyPart(
            text=event.get("content") or "",
            logprobs=self._logprobs(event.get("completion_probabilities")),
            done_reason=_reason(event) if event.get("stop") else "",
            timings=event.get("timings") or {},
            towerd=event.get("towerd"),
        )

    def of_whole(self, reply: dict[str, Any]) -> ReplyPart:
        return self.of_event(reply | {"stop": True})


def _reason(event: dict[str, Any]) -> str:
    return "length" if event.get("stop_type") == "limit" else "stop"
