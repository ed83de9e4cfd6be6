"""Limits that keep one client from delaying the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from towerd.errors import InvalidRequest

BACKLOGS_RAM_SHARE = 32
"""Streams that their clients do not take may have one in so many parts of a limited RAM."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of the HTTP API that is not a setting of the daemon."""

    write_stall_s: float = 60.0
    """The request of a streaming client that reads nothing for this long is cancelled."""
    read_stall_s: float = 30.0
    """A body that stops arriving for this long is refused (408)."""
    inline_bytes_max: int = 32 * 1024
    """Bodies up to this size are decoded on the event loop (well under a millisecond)."""
    events_max: int = 64
    """Events of one response that may wait to be written; beyond that the producers wait."""
    backlog_bytes_max: int = 4 << 20
    """Bytes of a stream that its client has not taken; beyond that it is cut off."""
    backlogs_bytes_max: int = 64 << 20
    """The same of all clients together; beyond that the one that is furthest behind is cut off."""
    grace_s: float = 10.0
    """How long generations may continue at shutdown before they are cancelled."""
    linger_s: float = 1.0
    """How long all other requests may continue after that; a tool that llama-server runs may take
    minutes."""
    values_max: int = 2_000_000
    """Commas in a body that Python decodes, which blocks every other thread."""
    messages_max: int = 65_536
    """Messages of a chat; this many one-letter messages take a second to parse."""
    parts_max: int = 65_536
    """Content parts and tool calls of all messages of a chat together."""
    tools_max: int = 4096
    """Tools, or functions, of a chat."""
    template_kwargs_max: int = 1024
    """Variables for the chat template."""
    stops_max: int = 1024
    """Stop strings per request."""
    biases_max: int = 131_072
    """Entries of logit_bias, each of which is applied to every token."""
    samplers_max: int = 64
    """Samplers in a row, each of which runs for every token."""
    breakers_max: int = 64
    """Sequence breakers, each of which is matched against every token of the vocabulary."""
    response_fields_max: int = 1024
    """Fields of `response_fields`, each of which is looked up for every choice."""
    page_max: int = 1000
    """Entries of one page of a towerd listing."""

    def within(self, ram_max: int) -> Limits:
        """The same, for a daemon that may take so many bytes of RAM; 0: any number."""
        share = ram_max // BACKLOGS_RAM_SHARE
        return (
            replace(self, backlogs_bytes_max=share) if 0 < share < self.backlogs_bytes_max else self
        )

    def check(self, body: Any) -> None:
        """Raises InvalidRequest, naming the field, if a decoded body exceeds a limit."""
        if not isinstance(body, Mapping):
            return
        for name, most in self._lengths():
            value = body.get(name)
            is_counted = isinstance(value, list | dict) or name == "samplers"
            if is_counted and isinstance(value, list | dict | str) and len(value) > most:
                raise InvalidRequest(
                    f"Field '{name}': at most {most} entries are allowed, but it has {len(value)}"
                )
        messages = body.get("messages")
        if isinstance(messages, list) and sum(map(_n_parts, messages)) > self.parts_max:
            raise InvalidRequest(
                f"Field 'messages': at most {self.parts_max} content parts and tool calls are "
                "allowed"
            )

    def _lengths(self) -> tuple[tuple[str, int], ...]:
        """Fields that are lists, objects or names of samplers, with their limits."""
        return (
            ("messages", self.messages_max),
            ("tools", self.tools_max),
            ("functions", self.tools_max),
            ("chat_template_kwargs", self.template_kwargs_max),
            ("stop", self.stops_max),
            ("logit_bias", self.biases_max),
            ("samplers", self.samplers_max),
            ("dry_sequence_breakers", self.breakers_max),
            ("response_fields", self.response_fields_max),
        )


def _n_parts(message: Any) -> int:
    if not isinstance(message, Mapping):
        return 0
    lists = (message.get("content"), message.get("tool_calls"))
    return sum(len(value) for value in lists if isinstance(value, list))
