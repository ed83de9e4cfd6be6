"""What of a long chat stays in the live cache: pure functions over arrays."""

from towerd.retention.base import (
    Mass,
    Positions,
    Retention,
    RetentionConfig,
    Rows,
    Signal,
    View,
)
from towerd.retention.factory import NAMES, open_retention, retention_config, signals_of

__all__ = [
    "NAMES",
    "Mass",
    "Positions",
    "Retention",
    "RetentionConfig",
    "Rows",
    "Signal",
    "View",
    "open_retention",
    "retention_config",
    "signals_of",
]
