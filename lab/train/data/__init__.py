"""Training text: records, their tokens, windows of them."""

from __future__ import annotations
