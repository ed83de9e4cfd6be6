"""Recognising a chat that goes on by what was said in it, before anybody knows its tokens.

Which tokens a chat request is evaluated as only llama-server can tell, and asking takes a round
trip. A client sends all of the chat again at every turn: when that is what it sent before, then
the reply that it got, then more, the chat goes on in the slot where it sits. This only guesses
where a request belongs, and nothing is lost by a wrong guess but time: llama-server compares
tokens itself, and what is recorded are the tokens, learned while the request runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MESSAGES_MAX = 1000
_DIGEST_BYTES = 16
_UNSAID = frozenset(
    (
        "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n_predict",
        "temperature", "top_k", "top_p", "min_p", "seed", "stop", "user", "metadata",
    )
)  # fmt: skip
"""Fields without a part in the prompt; whatever else is set may have one."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A chat request that got its reply."""

    n: int
    """Messages that it had."""
    digest: bytes
    """Of these, and of what else the prompt may hang on."""
    reply: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """The messages of a chat request."""

    digests: tuple[bytes, ...]
    """[k]: of what else the prompt may hang on, and the first k messages."""
    ends: tuple[int, ...]
    """[k]: bytes that these take as JSON."""
    replies: tuple[str | None, ...]
    """[k]: the text of message k if it is the assistant's."""

    def answered(self, reply: str) -> Answered:
        """This request with its reply."""
        return Answered(len(self.replies), self.digests[-1], reply)

    def continues(self, before: Answered) -> bool:
        """Whether this is `before`, its reply, and something after that."""
        n = before.n
        if n + 1 >= len(self.replies) or self.digests[n] != before.digest:
            return False
        reply = self.replies[n]
        return reply is not None and reply.strip() == before.reply.strip()

    def bytes_after(self, n: int) -> int:
        """What the messages after the first `n` take: there are no more tokens in their texts."""
        return self.ends[-1] - self.ends[n]


def spoken_of(body: Mapping[str, Any]) -> Spoken | None:
    """What a chat request says; None if it is no ordinary one."""
    messages = body.get("messages")
    if not isinstance(messages, list) or len(messages) > MESSAGES_MAX:
        return None
    if not all(isinstance(message, dict) for message in messages):
        return None
    try:
        rest = msgspec.json.encode({k: v for k, v in body.items() if k not in _UNSAID})
        parts = [msgspec.json.encode(message) for message in messages]
    except (TypeError, UnicodeEncodeError):
        return None
    so_far = hashlib.blake2b(rest, digest_size=_DIGEST_BYTES)
    digests, ends = [so_far.digest()], [0]
    for part in parts:
        so_far.update(b"%d:%s" % (len(part), part))
        digests.append(so_far.digest())
        ends.append(ends[-1] + len(part))
    return Spoken(tuple(digests), tuple(ends), tuple(_reply(message) for message in messages))


def _reply(message: Mapping[str, Any]) -> str | None:
    """The text of an assistant's message; "" if it only calls tools."""
    if message.get("role") != "assistant":
        return None
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))
