"""Caches whose size was set and that are made smaller to keep to a limit on RAM."""

from __future__ import annotations

import logging
from dataclasses import replace

from towerd.settings.config import Config

log = logging.getLogger(__name__)

_CACHES = {"hot_bytes": "--hot-bytes", "recall_bytes": "--recall-bytes"}


def warn_of_lowered(said: Config, used: Config, limit: str) -> None:
    """Log a warning for each such cache. said, used: the settings, and those in force. limit: it as a part of a sentence"""
    auto = replace(said, hot_bytes=-1, recall_bytes=-1)
    for name, flag in _CACHES.items():
        before, after, usual = (getattr(each, name) for each in (said, used, auto))
        is_share = said.behind_router and before < usual  # the router has divided it
        if after >= before or before == usual or is_share:
            continue
        if name == "recall_bytes" and said.retention == "none":
            continue
        log.warning(
            f"{flag} is {_mib(after)} instead of {_mib(before)}: {limit} has room for no more beside the model; "
            "raise it, or lower --ctx-size"
        )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
