"""Replies in Ollama's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from math import sqrt
from typing import Any

from towerd.api.http.translation import Translation
from towerd.api.ollama.parts import PartReader, ReplyPart

_NS_A_MS = 1_000_000
Said = Callable[[ReplyPart], dict[str, Any]]
"""The fields that say what a part says."""


def chat_said(part: ReplyPart) -> dict[str, Any]:
    """Of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": part.text}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}


def generate_said(part: ReplyPart) -> dict[str, Any]:
    """Of /api/generate."""
    return {"response": part.text} | ({"thinking": part.thinking} if part.thinking else {})


def head_of(model: str) -> dict[str, Any]:
    """The fields that every object of a reply begins with."""
    return {"model": model, "created_at": now()}


def now() -> str:
    """The time as Ollama writes it."""
    return rfc3339(time.time())


def rfc3339(unix_s: float) -> str:
    """A time as Ollama writes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


class OllamaReply(Translation):
    """A reply of /api/chat or /api/generate."""

    def __init__(
        self, path: str, model: str, reader: PartReader, said: Said, began_s: float
    ) -> None:
        """model: its name as the client gave it. began_s: when the request arrived; time.monotonic."""
        super().__init__(path)
        self._model = model
        self._reader = reader
        self._said = said
        self._began_s = began_s

    def lines(self, event: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if (error := event.get("error")) is not None:
            message = error.get("message") if isinstance(error, dict) else error
            return [{"error": str(message)}]
        part = self._reader.of_event(event)
        found = [self._object(part)] if part.says_something else []
        if part.done_reason:
            found.append(self._last(part, ReplyPart()))
        return found

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        part = self._reader.of_whole(reply)
        return self._last(part, part)

    def _object(self, part: ReplyPart) -> dict[str, Any]:
        logprobs = {"logprobs": part.logprobs} if part.logprobs else {}
        return head_of(self._model) | self._said(part) | {"done": False} | logprobs

    def _last(self, part: ReplyPart, said: ReplyPart) -> dict[str, Any]:
        """The object with which a reply ends. said: what it says of its text."""
        end = {"done": True, "done_reason": part.done_reason} | self._durations(part)
        towerd = {} if part.towerd is None else {"towerd": part.towerd}
        return self._object(said) | end | towerd

    def _durations(self, part: ReplyPart) -> dict[str, int]:
        total_ms = (time.monotonic() - self._began_s) * 1e3
        evaluated_ms = part.timings.get("prompt_ms", 0.0)
        generated_ms = part.timings.get("predicted_ms", 0.0)
        n_prompt = part.timings.get("cache_n", 0) + part.timings.get("prompt_n", 0)
        # What is neither: the wait for the model, for a place, and for stored rows.
        load_ms = max(0.0, total_ms - evaluated_ms - generated_ms)
        return {
            "total_duration": int(total_ms * _NS_A_MS),
            "load_duration": int(load_ms * _NS_A_MS),
            "prompt_eval_count": n_prompt,
            "prompt_eval_duration": int(evaluated_ms * _NS_A_MS),
            "eval_count": part.timings.get("predicted_n", 0),
            "eval_duration": int(generated_ms * _NS_A_MS),
        }


class EmbedReply(Translation):
    """A reply of /api/embed, or of the older /api/embeddings for one text."""

    def __init__(
        self, path: str, model: str, n_dimensions: int, began_s: float, *, one: bool
    ) -> None:
        """n_dimensions: of the embeddings; 0: all that there are. began_s: as for `OllamaReply`. one: whether
        it is of the older one."""
        super().__init__(path)
        self._model = model
        self._n_dimensions = n_dimensions
        self._one = one
        self._began_s = began_s
        self._load_s = time.monotonic() - began_s

    def lines(self, event: dict[str, Any]) -> Iterable[dict[str, Any]]:
        raise AssertionError("embeddings are not streamed")

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        rows = sorted(reply["data"], key=lambda each: int(each["index"]))
        embeddings = [shortened(each["embedding"], self._n_dimensions) for each in rows]
        if self._one:
            return {"embedding": embeddings[0]}
        total_ns = int((time.monotonic() - self._began_s) * 1e9)
        return {
            "model": self._model,
            "embeddings": embeddings,
            "total_duration": total_ns,
            "load_duration": int(self._load_s * 1e9),
            "prompt_eval_count": reply.get("usage", {}).get("prompt_tokens", 0),
        }


def shortened(embedding: list[float], n_dimensions: int) -> list[float]:
    """The first dimensions of an embedding, of length one again; 0: all, as they are."""
    if not 0 < n_dimensions < len(embedding):
        return embedding
    kept = embedding[:n_dimensions]
    length = sqrt(sum(each * each for each in kept))
    return [each / length for each in kept] if length else kept
