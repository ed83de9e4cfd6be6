"""A model that says how likely each next token is, the same on every machine (`exact.py`)."""

from __future__ import annotations
