"""Where state checkpoints of a prompt are taken, for memories that cannot be cut at any token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from towerd.engine.anchors import APART_MIN, GRAM, Anchors, WordStarts
from towerd.store import Handle
from towerd.tokens import Ids

CHECKPOINTS_MAX = 16
"""About the most checkpoints that are taken of one prompt."""
_RATIOS = (8, 4, 2, 1)


class CheckpointPositions:
    """Chooses positions, and learns where prompts diverge. Used by one thread."""

    def __init__(self, pieces: Sequence[bytes], message_ends: Collection[int], every: int) -> None:
        """pieces: the bytes of each token; message_ends: ids of the tokens that end a message; every:
        tokens between checkpoints of a long text"""
        self._ends = np.array(sorted(message_ends), np.int32)
        self._every = every
        self._words = WordStarts(pieces, message_ends)
        self._anchors = Anchors(self._words)

    def learn(self, path: Handle, ids: Ids, at: int) -> None:
        """Note that the prompt `ids` leaves a stored tower at token `at`, if that continues there."""
        tower = path.beyond(at, GRAM + 1)
        if len(tower):
            self._anchors.learn(ids, path.scope, at, tower)

    def of(self, ids: Ids, scope: str, start: int, branches: Iterable[int]) -> tuple[int, ...]:
        """Positions in (start, len(ids)), ascending, for a prompt that is evaluated from `start` on.
        branches: where it is known to leave others"""
        ends: list[int] = (np.flatnonzero(np.isin(ids, self._ends)) + 1).tolist()
        chosen = {start, *(self._words.before(ids, n) for n in branches if n < len(ids))}
        # Behind its first message, a system prompt, other chats begin, and oldest turns are dropped.
        likely = [*ends[:1], *self._anchors.positions(ids, scope, start)]
        for at in sorted(likely):
            if all(abs(at - n) >= APART_MIN for n in chosen):
                chosen.add(at)
        return plan_checkpoints(start, len(ids), self._every, ends, chosen)


def plan_checkpoints(
    start: int, end: int, every: int, message_ends: Iterable[int], branches: Iterable[int]
) -> tuple[int, ...]:
    """Positions in (start, end), ascending, at which to take a checkpoint of a prompt of `end`
    tokens that is evaluated from `start` on. Later prompts are likely to continue there: where messages
    end, where prompts are known to branch, just before the end, and at regular distances in a long text
    without any. The further from the end, the larger the distance: a checkpoint costs the same anywhere,
    and old turns are edited less often.

    every: the spacing near the end; branches: always included. The next position is at most
    `every + max(every, d / ratio)` tokens away (d: the distance from the end), where ratio is the
    largest of 8, 4, 2, 1 that needs no more than `CHECKPOINTS_MAX` checkpoints."""
    last = end - 1
    if start >= last:
        return ()
    messages = {p for p in message_ends if start < p <= last}
    near = [p for p in messages if end - p <= APART_MIN]
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
        gap_min = max(APART_MIN if p in messages else every, (end - p) // ratio)
        if p in fixed or at - p >= gap_min:
            positions.append(p)
            at = p
    return positions
