"""Texts for benchmarks and training: readers, the chat template, tasks of retrieval."""

from __future__ import annotations
