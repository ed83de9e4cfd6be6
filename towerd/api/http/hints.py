"""Hints in a request about where it belongs: session, workflow and agent. Hints affect what is kept
ready, never the answer, and only for the caller's own tenant.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from towerd.errors import InvalidRequest

NAME_CHARS_MAX = 128
SESSION_HEADER = "X-Towerd-Session"
WORKFLOW_HEADER = "X-Towerd-Workflow"
AGENT_HEADER = "X-Towerd-Agent"


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


def _name(request: web.Request, header: str) -> str | None:
    name = request.headers.get(header)
    return checked_name(name, header) if name else None
