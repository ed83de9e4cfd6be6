"""What conversations may take of the RAM beside the live context, by the settings."""

from __future__ import annotations

from towerd.settings.config import Config
from towerd.system.machine import ram_bytes


def pinned_bytes() -> int:
    """For rows of precached and pinned prompts, where it is more than --hot-bytes."""
    return ram_bytes() // 8


def parked_bytes(config: Config) -> int:
    """For rows of chats that a retention made partial and that left the context."""
    return 2 * config.recall_bytes


def partial_bytes(config: Config) -> int:
    """For all that a retention keeps of chats outside the context: 0 without one."""
    return 0 if config.retention == "none" else config.recall_bytes + parked_bytes(config)


def chats_bytes(config: Config) -> int:
    """For rows that are not pinned."""
    return config.hot_bytes + partial_bytes(config)
