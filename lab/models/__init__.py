"""Makes GGUF files: random weights of any shape and architecture, and llama2.c story models."""

from __future__ import annotations
