"""Chats about pictures, on a daemon and on llama-server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import requests
from daemon import Daemon, reuse_of

from lab.models.vision import picture

N_PREDICT = 12


def look_at(*seeds: int, text: str = "What is this?") -> dict[str, Any]:
    """A user's message with pictures after its text."""
    urls = [f"data:image/png;base64,{picture(seed)}" for seed in seeds]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


@dataclass
class Said:
    """A greedy reply."""

    text: str
    n_prompt: int
    """Tokens of its prompt."""
    reuse: dict[str, int]
    """X-Towerd-Reuse; empty from llama-server."""
    session: str


def say(url: str, messages: list[Any], **fields: Any) -> Said:
    """Ask for a chat's next answer."""
    body = {"messages": messages, "temperature": 0, "max_tokens": N_PREDICT, **fields}
    reply = requests.post(url + "/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    done = reply.json()
    reuse = reuse_of(reply.headers) if "X-Towerd-Reuse" in reply.headers else {}
    message, usage = done["choices"][0]["message"], done["usage"]
    session = reply.headers.get("X-Towerd-Session", "")
    return Said(message["content"], usage["prompt_tokens"], reuse, session)


def answered(messages: list[Any], said: Said, text: str) -> list[Any]:
    """The chat with its answer and the next question."""
    answer = {"role": "assistant", "content": said.text}
    return [*messages, answer, {"role": "user", "content": text}]


def counts(daemon: Daemon) -> tuple[int, int]:
    """Media that were encoded and evaluated since the daemon's start."""
    stats = daemon.get("/towerd/v1/stats")["engine"]
    return stats["media_encoded"], stats["media_evaluated"]
