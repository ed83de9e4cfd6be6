"""Models that say how likely each next token is (`base.py`), for the forms that need a runtime."""

from __future__ import annotations
