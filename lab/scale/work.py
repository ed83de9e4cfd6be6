"""Work: what the machines of a fleet do with a session, in order, for whatever stands for the shared tier.

A machine puts a session as `towerd.tiers.shared` does: a file with the rows of each turn, marks, a record. Before a
prompt is evaluated it looks for what it lacks. Both `CountedTier` and `RealTier` are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lab.scale.sessions import RecordedSession, kept_of

MARK_TOKENS_MIN = 256
QUIET_S = 5
"""A daemon puts by itself after as long without a request."""


@dataclass(frozen=True, slots=True)
class RowsRun:
    """Rows [p0, p1) of a path, in a file and an object of their own."""

    p0: int
    p1: int
    number: int
    """Of the file: two have equal rows where it is equal."""
    is_public: bool = False

    @property
    def n_tokens(self) -> int:
        return self.p1 - self.p0


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Tokens [.., end) of a prompt that nothing else has, behind those of the pieces before it."""

    number: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenPath:
    """A prompt's tokens. The first piece may be of a base."""

    pieces: tuple[TokenPiece, ...]
    base: int = -1
    """The number of that piece; -1: there is no base."""

    @property
    def n(self) -> int:
        """Tokens."""
        return self.pieces[-1].end

    def common(self, other: TokenPath) -> int:
        """Tokens that both begin with."""
        n = 0
        for one, two in zip(self.pieces, other.pieces, strict=False):
            if one.number != two.number:
                break
            n = min(one.end, two.end)
            if one.end != two.end:
                break
        return n

    def longer(self, kept: int, number: int, n: int) -> TokenPath:
        """Its first `kept` tokens and then new ones, `n` in all."""
        starts = (0, *(each.end for each in self.pieces))
        head = [
            TokenPiece(piece.number, min(piece.end, kept))
            for start, piece in zip(starts, self.pieces, strict=False)
            if start < kept
        ]
        tail = [TokenPiece(number, n)] if n > kept else []
        return TokenPath((*head, *tail), self.base)


class Tier(Protocol):
    """What is told of the work."""

    def put_base(self, path: TokenPath, run: RowsRun) -> None:
        """A daemon puts a public base."""
        ...

    def put_session(
        self, session: int, path: TokenPath, runs: Sequence[RowsRun], turns: int
    ) -> None:
        """A daemon puts a session, as after so many turns. `runs`: the files that it has of the path."""
        ...

    def look_up(self, path: TokenPath, n_known: int) -> None:
        """A daemon looks up a prompt of which it has `n_known` tokens, and fetches what there is."""
        ...

    def pull(self, session: int, path: TokenPath, n_known: int) -> None:
        """A person opens a session by its id, where only its first `n_known` tokens are."""
        ...


@dataclass(frozen=True, slots=True)
class TierHabits:
    """How a fleet uses the tier."""

    puts: str = "turn"
    """`turn`: sessions are pinned, and put after every turn with a pause behind it; `end`: once, at their end."""
    away: float = 0.1
    """Share of later turns that come to a machine without the session's rows."""
    pulled: float = 0.1
    """Share of the sessions that are opened by their id elsewhere in the end."""


@dataclass(slots=True)
class Fleet:
    """Plays sessions of one tenant, one after the other."""

    tier: Tier
    habits: TierHabits
    _bases: dict[int, TokenPath] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _away: float = 0.0
    _pulled: float = 0.0

    def put_bases(self, shapes: Iterable[RecordedSession]) -> None:
        """Put what these sessions begin with, as `towerctl precache` and idle time do."""
        for shape in shapes:
            if shape.base >= 0 and shape.base not in self._bases:
                number = next(self._numbers)
                path = TokenPath((TokenPiece(number, shape.shared),), number)
                self._bases[shape.base] = path
                self.tier.put_base(path, RowsRun(0, path.n, number, True))

    def play(self, session: int, shape: RecordedSession) -> None:
        """The turns of a session. Rows of a turn are a file, but that of its last token, which is evaluated with the
        next turn. A prompt that lost the end of the one before has the first rows of a file as one of its own."""
        base = self._bases.get(shape.base, TokenPath((TokenPiece(-1, 0),)))
        path, runs = base, self._base_runs(base)
        for turn, (n, lost) in enumerate(zip(shape.prompts, shape.lost, strict=True)):
            kept = base.n if turn == 0 else kept_of(path.n, lost, n)
            path = path.longer(kept, next(self._numbers), n)
            is_away = turn > 0 and self._is_away()
            known = path.common(base) if is_away else kept
            if n >= MARK_TOKENS_MIN and n // MARK_TOKENS_MIN > known // MARK_TOKENS_MIN:
                self.tier.look_up(path, known)
            runs = self._runs(runs, kept, n - 1)
            is_last = turn + 1 == len(shape.prompts)
            pause = None if is_last else shape.pauses_s[turn + 1]
            if is_last or (self.habits.puts == "turn" and (pause or 0) >= QUIET_S):
                self.tier.put_session(session, path, runs, turn + 1)
        self._pulled += self.habits.pulled
        if self._pulled >= 1:
            self._pulled -= 1
            self.tier.pull(session, path, path.common(base))

    def _base_runs(self, base: TokenPath) -> list[RowsRun]:
        return [RowsRun(0, base.n, base.base, True)] if base.base >= 0 else []

    def _is_away(self) -> bool:
        """Evenly spaced, so that a few sessions have the share, too."""
        self._away += self.habits.away
        if self._away < 1:
            return False
        self._away -= 1
        return True

    def _runs(self, runs: Sequence[RowsRun], kept: int, end: int) -> list[RowsRun]:
        """The files of a path whose first `kept` tokens were in `runs`, and whose rows end at `end`."""
        kept = min(kept, end)
        found = [run for run in runs if run.p1 <= kept]
        cut = next((run for run in runs if run.p0 < kept < run.p1), None)
        if cut is not None:
            found.append(RowsRun(cut.p0, kept, next(self._numbers), cut.is_public))
        at = found[-1].p1 if found else 0
        if at < end:
            found.append(RowsRun(at, end, next(self._numbers)))
        return found
