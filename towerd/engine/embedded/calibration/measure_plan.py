"""MeasurePlan: the windows of a text, and continuations within them, that are measured."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from towerd.errors import TowerdError
from towerd.tiers.shrink import SINKS, TAIL
from towerd.tokens import Ids

NEXT_TOKENS = 64
"""Tokens of one continuation: a context of 64 sequences has output rows for them anyway."""
PREFIX_TOKENS_MIN = SINKS + TAIL + 64
SHORT_PREFIX_TOKENS = (96, 192, 288, 384)
"""Tokens of the short chats that are measured."""
WINDOW_TOKENS_MAX = 2048
ROWS_BYTES_MAX = 256 << 20
"""Native rows that a measurement keeps in RAM."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The continuation `ids[p:p + NEXT_TOKENS]` of one window's prefix `ids[:p]`."""

    window: int
    p: int


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """The measured windows of a text, and the continuations in them."""

    windows: tuple[Ids, ...]
    continuations: tuple[Continuation, ...]
    """In an order in which the first few, however many, are spread over the whole text."""

    def prefix_of(self, window: int) -> int:
        """Tokens of a window before its last continuation."""
        return max(c.p for c in self.continuations if c.window == window)

    @property
    def n_cells(self) -> int:
        """Cells that the largest step needs."""
        return max(c.p for c in self.continuations) + NEXT_TOKENS

    def of_short_chats(self) -> MeasurePlan:
        """Continuations of the beginnings of the windows."""
        places = [
            Continuation(i, p)
            for p in SHORT_PREFIX_TOKENS
            for i, window in enumerate(self.windows)
            if p + NEXT_TOKENS < len(window)
        ]
        return MeasurePlan(self.windows, tuple(places))

    def digest(self) -> str:
        """Identifies the measured ids and places."""
        digest = hashlib.blake2b(digest_size=16)
        for window in self.windows:
            digest.update(len(window).to_bytes(8, "little") + window.astype("<i4").tobytes())
        for continuation in self.continuations:
            digest.update(f"{continuation.window}:{continuation.p};".encode())
        return digest.hexdigest()


def plan_measurement(
    ids: Ids, *, bos: int | None, window_tokens: int, token_bytes: int, n_continuations: int
) -> MeasurePlan:
    """Windows of `ids` (without special tokens; each window begins with `bos` if there is one)
    and `n_continuations` places spread evenly over them, fewer if the text has no more.

    Raises TowerdError when window or text are too short for two of them: one does not show how
    much costs vary."""
    head = np.array([] if bos is None else [bos], np.int32)
    n = min(window_tokens, WINDOW_TOKENS_MAX, max(1, ROWS_BYTES_MAX // token_bytes))
    least = PREFIX_TOKENS_MIN + NEXT_TOKENS + 1
    if n < least or len(head) + len(ids) < least:
        raise TowerdError(
            f"Measuring takes a context and a text of at least {least} tokens; "
            f"here they have {n} and {len(head) + len(ids)}."
        )
    ids = ids[: max(1, ROWS_BYTES_MAX // token_bytes)]
    step = n - len(head)
    windows = [np.concatenate([head, ids[at : at + step]]) for at in range(0, len(ids), step)]
    windows = [window for window in windows if len(window) >= least]
    places = [Continuation(i, p) for i, window in enumerate(windows) for p in _places(len(window))]
    if len(places) < 2:
        raise TowerdError(
            f"Measuring takes two continuations of {NEXT_TOKENS} tokens; the text has room for one."
        )
    n_picked = min(n_continuations, len(places))
    picked = np.linspace(0, len(places) - 1, n_picked).round().astype(int)
    return MeasurePlan(tuple(windows), tuple(places[picked[i]] for i in _spread(n_picked)))


def _spread(n: int) -> list[int]:
    """0..n-1 in the order of their reversed bits (van der Corput), which is even from the
    start: after the first few come those between them."""
    n_bits = (n - 1).bit_length()
    return sorted(range(n), key=lambda i: int(f"{i:0{n_bits}b}"[::-1], 2) if n_bits else 0)


def _places(n: int) -> list[int]:
    """Ends of prefixes in a window of `n` tokens, with a known token after each continuation."""
    return sorted(range(n - NEXT_TOKENS - 1, PREFIX_TOKENS_MIN - 1, -NEXT_TOKENS))
