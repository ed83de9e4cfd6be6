"""The sizes of context mixing, which `_native.Mixer` and the trained files agree on."""

from __future__ import annotations

DYNAMIC, MATCHES, MATCH_MAX = 7, 1, 32
PLAIN, BREAK, OPENING = 0, 1, 2
"""Kinds of tokens: text within a line, text with a line break, and the mark that opens a message,
after which its author's name stands up to the end of the line."""
STATIC = 5
BLENDS = 2
INPUTS = 1 + STATIC + DYNAMIC + MATCHES + BLENDS + 2
LEVELS, SETS, FINAL = 48, 6, 128


def n_maps(n_tokens: int) -> int:
    """Numbers of the state that belong to maps."""
    return n_tokens + STATIC * LEVELS**2 + DYNAMIC * 256 + MATCHES * 2 * MATCH_MAX
