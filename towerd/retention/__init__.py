"""Chooses which positions of a long chat stay in the live cache: pure functions over arrays."""

from towerd.retention.base import (
    Keys,
    Mass,
    Positions,
    Recalling,
    Retention,
    RetentionConfig,
    Rows,
    Signal,
    View,
)
from towerd.retention.factory import (
    NAMES,
    can_recall,
    open_retention,
    retention_config,
)

__all__ = [
    "NAMES",
    "Keys",
    "Mass",
    "Positions",
    "Recalling",
    "Retention",
    "RetentionConfig",
    "Rows",
    "Signal",
    "View",
    "can_recall",
    "open_retention",
    "retention_config",
]
