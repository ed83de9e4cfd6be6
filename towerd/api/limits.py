"""Bounds that keep one client from holding the others up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the HTTP surface that is not a setting of the daemon."""

    write_stall_s: float = 60.0
    """A streaming client that takes nothing for this long loses its request."""
    read_stall_s: float = 30.0
    """A body that stops arriving for this long is refused (408)."""
    inline_bytes_max: int = 32 * 1024
    """Bodies up to this size are decoded on the event loop (well under a millisecond)."""
    events_max: int = 64
    """Events of one response waiting to be written; the producers wait beyond it."""
    ping_s: float = 30.0
    """Silence after which a stream gets an SSE comment, unless the request says otherwise."""
    grace_s: float = 10.0
    """How long running generations may finish at shutdown before they are cancelled."""
    linger_s: float = 1.0
    """And then all other requests: a tool that llama-server runs may take minutes."""
    probs_max: int = 1024
    """Alternatives per token a client may ask for; formatting them is loop time."""
    stops_max: int = 1024
    """Stop strings per request."""
    prompts_max: int = 1024
    """Prompts per request."""
    page_max: int = 1000
    """Entries of one page of a towerd listing."""
