"""What to do with a daemon that is ready."""

from __future__ import annotations


def next_steps(url: str, *, has_chat_page: bool) -> str:
    """Three lines: its page, the address for clients, and the command that starts an agent."""
    page = f"chat page: {url}/" if has_chat_page else f"page: {url}/towerd/ (make ui: a chat page)"
    return (
        f"  {page}\n"
        f"  clients: {url}/v1 (Anthropic's: {url})\n"
        "  agents: towerctl launch claude (towerctl launch --help names the others)"
    )
