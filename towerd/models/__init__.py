"""Finds, fetches and makes GGUF files: known models, the bundled story model and random-weight
models of any shape."""

from __future__ import annotations
