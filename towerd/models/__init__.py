"""Finds and fetches GGUF files: known models, the bundled ones, those of this machine."""

from __future__ import annotations
