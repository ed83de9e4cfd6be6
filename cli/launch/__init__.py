"""Starting agents with the daemon as their model."""

from __future__ import annotations
