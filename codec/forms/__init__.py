"""The ways to write ids as bits (`form.py`)."""

from __future__ import annotations
