"""ChatText: recognises a continued chat by its messages, before its tokens are known.

Only llama-server can tell which tokens a chat request is evaluated as, and asking takes a round
trip. A client sends all of the chat again at every turn: if a request is what it sent before, then
the reply that it got, then more, the chat continues in its slot. This only guesses where a request
belongs, and a wrong guess costs nothing but time: llama-server compares tokens itself, and the
recorded tokens are learned while the request runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MESSAGES_MAX = 1000
_DIGEST_BYTES = 16
_NOT_IN_PROMPT = frozenset(
    "messages stream stream_options max_tokens max_completion_tokens n_predict temperature top_k"
    " top_p min_p seed stop user metadata".split()
)
"""Fields that do not change the prompt; any other field may."""


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """A chat request that got its reply."""

    n: int
    """Number of its messages."""
    digest: bytes
    """Digest of the messages and of the other fields that may change the prompt."""
    reply: str


@dataclass(frozen=True, slots=True)
class ChatText:
    """The messages of a chat request."""

    digests: tuple[bytes, ...]
    """[k]: digest of the fields that may change the prompt and of the first k messages."""
    ends: tuple[int, ...]
    """[k]: bytes of the first k messages as JSON."""
    replies: tuple[str | None, ...]
    """[k]: the text of message k if it is the assistant's."""

    def answered(self, reply: str) -> AnsweredChat:
        """The request together with its reply."""
        return AnsweredChat(len(self.replies), self.digests[-1], reply)

    def continues(self, before: AnsweredChat) -> bool:
        """Whether this is `before`, its reply, and something after that."""
        n = before.n
        if n + 1 >= len(self.replies) or self.digests[n] != before.digest:
            return False
        reply = self.replies[n]
        return reply is not None and reply.strip() == before.reply.strip()

    def bytes_after(self, n: int) -> int:
        """Bytes of the messages after the first `n`, which have no more tokens than that."""
        return self.ends[-1] - self.ends[n]


def chat_text_of(body: Mapping[str, Any]) -> ChatText | None:
    """The text of a chat request; None if it is not an ordinary one."""
    messages = body.get("messages")
    if not isinstance(messages, list) or len(messages) > MESSAGES_MAX:
        return None
    if not all(isinstance(message, dict) for message in messages):
        return None
    try:
        rest = msgspec.json.encode({k: v for k, v in body.items() if k not in _NOT_IN_PROMPT})
        parts = [msgspec.json.encode(message) for message in messages]
    except (TypeError, UnicodeEncodeError):
        return None
    so_far = hashlib.blake2b(rest, digest_size=_DIGEST_BYTES)
    digests, ends = [so_far.digest()], [0]
    for part in parts:
        so_far.update(b"%d:%s" % (len(part), part))
        digests.append(so_far.digest())
        ends.append(ends[-1] + len(part))
    return ChatText(tuple(digests), tuple(ends), tuple(_reply(message) for message in messages))


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
