"""Texts for benchmarks and training: readers, a tokenizer, the chat template, tasks of retrieval."""

from __future__ import annotations
