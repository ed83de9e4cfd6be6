"""Where to take boundary states while a prompt is evaluated.

Likely places to go on from: where messages end, where prompts are known to part, just before the
end; and every so many tokens of a long stretch without any. The further from the end, the
further apart: a state costs the same wherever it stands, and old turns are edited less.
"""

from __future__ import annotations

from collections.abc import Iterable

MARKS_MAX = 16
"""States taken of one prompt."""
_RATIOS = (8, 4, 2, 1)
_GAP_MIN = 16
"""States closer together than this save next to nothing."""


def plan_marks(
    start: int, end: int, every: int, message_ends: Iterable[int], branches: Iterable[int]
) -> tuple[int, ...]:
    """Positions in (start, end), ascending, at which to take a state of a prompt of `end` tokens
    that is evaluated from `start` on.

    every: the spacing near the end; branches: taken in any case. A mark is followed by the next
    at most `every + max(every, d / ratio)` tokens later (d: its distance from the end), where
    ratio is the largest of 8, 4, 2, 1 that needs no more than `MARKS_MAX`."""
    last = end - 1
    if start >= last:
        return ()
    messages = {p for p in message_ends if start < p <= last}
    near = [p for p in messages if end - p <= _GAP_MIN]
    fixed = {p for p in branches if start < p <= last} | {max(near, default=last)}
    grid = set(range(-(-(start + 1) // every) * every, last, every))
    marks: list[int] = []
    for ratio in _RATIOS:
        marks = _thinned(end, every, ratio, messages, grid - messages, fixed)
        if len(marks) <= MARKS_MAX:
            break
    return tuple(reversed(marks))


def _thinned(
    end: int, every: int, ratio: int, messages: set[int], grid: set[int], fixed: set[int]
) -> list[int]:
    """Descending."""
    marks: list[int] = []
    at = end
    for p in sorted(messages | grid | fixed, reverse=True):
        gap_min = max(_GAP_MIN if p in messages else every, (end - p) // ratio)
        if p in fixed or at - p >= gap_min:
            marks.append(p)
            at = p
    return marks
