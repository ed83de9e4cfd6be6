"""The positions of a prompt at which state checkpoints are taken while it is evaluated.

These are positions that later prompts are likely to continue from: where messages end, where
prompts are known to branch, just before the end, and at regular distances in a long text without
any. The further from the end, the larger the distance: a checkpoint costs the same anywhere, and
old turns are edited less often.
"""

from __future__ import annotations

from collections.abc import Iterable

CHECKPOINTS_MAX = 16
"""About the most checkpoints that are taken of one prompt."""
_RATIOS = (8, 4, 2, 1)
_GAP_MIN = 16
"""Checkpoints closer together than this save next to nothing."""


def plan_checkpoints(
    start: int, end: int, every: int, message_ends: Iterable[int], branches: Iterable[int]
) -> tuple[int, ...]:
    """Positions in (start, end), ascending, at which to take a checkpoint of a prompt of `end`
    tokens that is evaluated from `start` on.

    every: the spacing near the end; branches: always included. The next position is at most
    `every + max(every, d / ratio)` tokens away (d: the distance from the end), where ratio is the
    largest of 8, 4, 2, 1 that needs no more than `CHECKPOINTS_MAX` checkpoints."""
    last = end - 1
    if start >= last:
        return ()
    messages = {p for p in message_ends if start < p <= last}
    near = [p for p in messages if end - p <= _GAP_MIN]
    fixed = {p for p in branches if start < p <= last} | {max(near, default=last)}
    grid = set(range(-(-(start + 1) // every) * every, last, every))
    positions: list[int] = []
    for ratio in _RATIOS:
        positions = _spaced(end, every, ratio, messages, grid - messages, fixed)
        if len(positions) <= CHECKPOINTS_MAX:
            break
    return tuple(reversed(positions))


def _spaced(
    end: int, every: int, ratio: int, messages: set[int], grid: set[int], fixed: set[int]
) -> list[int]:
    """The positions for one ratio, descending."""
    positions: list[int] = []
    at = end
    for p in sorted(messages | grid | fixed, reverse=True):
        gap_min = max(_GAP_MIN if p in messages else every, (end - p) // ratio)
        if p in fixed or at - p >= gap_min:
            positions.append(p)
            at = p
    return positions
