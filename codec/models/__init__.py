"""Models that say how likely each next token is (`base.py`)."""

from __future__ import annotations
