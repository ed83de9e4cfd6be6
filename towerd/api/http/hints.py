"""Hints in a request about where it belongs: session, workflow and agent. Hints affect what is kept
ready, never the answer, and only for the caller's own tenant.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from towerd.errors import InvalidRequest

NAME_CHARS_MAX = 128
SESSION_HEADER = "X-Towerd-Session"
WORKFLOW_HEADER = "X-Towerd-Workflow"
AGENT_HEADER = "X-Towerd-Agent"
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Hints:
    """The names that the client gave; None: not given."""

    session: str | None = None
    workflow: str | None = None
    agent: str | None = None


def hints_of(request: web.Request) -> Hints:
    """The hints in a request's headers. Raises InvalidRequest."""
    return Hints(
        _name(request, SESSION_HEADER),
        _name(request, WORKFLOW_HEADER),
        _name(request, AGENT_HEADER),
    )


def checked_name(name: str, what: str) -> str:
    """`name`, if it is valid. Raises InvalidRequest."""
    if not 0 < len(name) <= NAME_CHARS_MAX or not name.isprintable():
        raise InvalidRequest(f"{what} must be at most {NAME_CHARS_MAX} printable characters")
    return name


def agent_of(body: Any) -> str | None:
    """A name for the agent with the system prompt and the tools of this chat request; None: it has
    neither. Never fails: the request is validated elsewhere."""
    messages = body.get("messages") if isinstance(body, dict) else None
    said: list[Any] = []
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("role") not in _SYSTEM_ROLES:
            break
        said.append(message.get("content"))
    tools = body.get("tools") if isinstance(body, dict) else None
    if not said and not tools:
        return None
    data = msgspec.json.encode([said, tools])
    return "~" + hashlib.blake2b(data, digest_size=8).hexdigest()


def _name(request: web.Request, header: str) -> str | None:
    name = request.headers.get(header)
    return checked_name(name, header) if name else None
