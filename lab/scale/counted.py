"""CountedTier: the requests of the shared tier, counted without rows, keys or hashes.

It knows what objects there are by what they are of. The counts are those of the real code, which a test compares
request by request; thousands of sessions of any model take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lab.scale.record_sizes import base_record, session_record
from lab.scale.requests import Requests
from lab.scale.work import RowsRun, TokenPath
from towerd.tiers.shared.marks import MARK_TOKENS
from towerd.tiers.shared.objects import (
    PART_BYTES,
    Record,
    RowsHeader,
    RowsPlace,
    count_parts,
    encode,
)
from towerd.tiers.shared.sealing import SEAL_BYTES
from towerd.tokens import ID_BYTES

_ASKED = 4


@dataclass(slots=True)
class _Shelf:
    """What a tenant, or the public, has of one path and those that continue it."""

    path: TokenPath = TokenPath(())
    marks: dict[int, tuple[RowsRun, ...]] = field(default_factory=dict)
    """Tokens -> the rows that the mark of so many names; none is missing at multiples of 256 below the last."""

    def along(self, path: TokenPath) -> dict[int, tuple[RowsRun, ...]]:
        """The marks that are on the way of `path`, too."""
        n = path.common(self.path) if self.path.pieces else 0
        return {at: runs for at, runs in self.marks.items() if at <= n}


class CountedTier:
    """`rows` are the requests for rows and marks, `records` all others. Implements `work.Tier`."""

    def __init__(self, token_bytes: int) -> None:
        """token_bytes: rows of a token"""
        self.rows, self.records = Requests(), Requests()
        self._token_bytes = token_bytes
        self._public: dict[int, _Shelf] = {}
        self._bases: dict[int, dict[int, tuple[RowsRun, ...]]] = {}
        """The tenant's own marks within a base."""
        self._session = -1  # none yet
        self._own = _Shelf()
        self._record_bytes: list[int] = []
        """Of the session: the bytes of each, sealed."""
        self._record_runs: tuple[RowsRun, ...] = ()
        self._other_runs: tuple[RowsRun, ...] = ()
        """What the last record names."""
        self._paths: dict[int, TokenPath] = {}
        """Of the objects that are there: what their rows are of."""

    def take(self) -> Requests:
        """All requests since this was called last."""
        taken = self.rows
        taken.add(self.records)
        self.rows, self.records = Requests(), Requests()
        return taken

    def put_base(self, path: TokenPath, run: RowsRun) -> None:
        """See Tier."""
        self.rows.get += 2 * len({path.n, path.n - 1} - {0})
        self._put_object(run, path)
        marks: dict[int, tuple[RowsRun, ...]] = {}
        self._put_marks(marks, path.n, (run,))
        self._public[path.base] = _Shelf(path, marks)
        self.records.list += 1
        self._put_record("bases", base_record(path.n, [self._place(run)]))

    def put_session(
        self, session: int, path: TokenPath, runs: Sequence[RowsRun], turns: int
    ) -> None:
        """See Tier."""
        own = self._marks_of(session, path)
        found = self._there(own, path, [run.p1 for run in runs])
        reached = found[-1].p1 if found else 0
        for run in runs:
            if run.p1 > reached:
                self._put_object(run, path)
                found = (*found, run)
        self._put_marks(own, found[-1].p1, found)
        self._own.path, self._own.marks = path, own
        base = self._bases.setdefault(path.base, {})
        n_base = path.pieces[0].end if path.base >= 0 else 0
        for n in range(MARK_TOKENS, n_base + 1, MARK_TOKENS):
            if n in own:
                base.setdefault(n, own[n])
        self._heads()
        others = {run.number: run for run in (*self._record_runs, *self._other_runs)}
        for run in found:
            others.pop(run.number, None)
        self._record_runs, self._other_runs = found, tuple(others.values())
        record = self._session_record(path, turns)
        self._put_record("sessions", record)
        self._record_bytes.append(len(encode(record)) + SEAL_BYTES)

    def look_up(self, path: TokenPath, n_known: int) -> None:
        """See Tier."""
        best: tuple[int, int, tuple[RowsRun, ...]] | None = None
        for marks in (self._marks_of(self._session, path), self._public_marks(path)):
            first, last = n_known // MARK_TOKENS + 1, path.n // MARK_TOKENS
            furthest = max((n // MARK_TOKENS for n in marks if n % MARK_TOKENS == 0), default=0)
            self.rows.head += n_probes(first, last, furthest)
            if min(furthest, last) >= first:
                n = min(furthest, last) * MARK_TOKENS
                self._get(self._mark_bytes(marks[n]))
                if best is None or (n, marks[n][-1].p1) > best[:2]:
                    best = n, marks[n][-1].p1, marks[n]
        if best is not None:
            self._fetch(best[2], path, n_known)

    def pull(self, session: int, path: TokenPath, n_known: int) -> None:
        """See Tier."""
        self._heads()
        self._fetch(self._record_runs, path, n_known)

    def _marks_of(self, session: int, path: TokenPath) -> dict[int, tuple[RowsRun, ...]]:
        """The tenant's marks on the way of a path: those that other sessions made of its base, and its own."""
        if session != self._session:
            self._session, self._own = session, _Shelf()
            self._record_bytes, self._record_runs, self._other_runs = [], (), ()
        n_base = path.pieces[0].end if path.base >= 0 else 0
        of_base = {n: runs for n, runs in self._bases.get(path.base, {}).items() if n <= n_base}
        return of_base | self._own.along(path)

    def _public_marks(self, path: TokenPath) -> dict[int, tuple[RowsRun, ...]]:
        shelf = self._public.get(path.base)
        return {} if shelf is None else shelf.along(path)

    def _there(
        self, own: dict[int, tuple[RowsRun, ...]], path: TokenPath, stored: Sequence[int]
    ) -> tuple[RowsRun, ...]:
        public = self._public_marks(path)
        for end in sorted({*stored, path.n - 1, path.n} - {0}, reverse=True):
            for marks in (own, public):
                self.rows.get += 1
                if end in marks:
                    self.rows.bytes_down += self._mark_bytes(marks[end])
                    inside = tuple(run for run in marks[end] if run.p1 <= end)
                    self.rows.head += len(inside)
                    return inside
        return ()

    def _put_marks(
        self, marks: dict[int, tuple[RowsRun, ...]], n_tokens: int, runs: tuple[RowsRun, ...]
    ) -> None:
        last = n_tokens // MARK_TOKENS
        furthest = max((n // MARK_TOKENS for n in marks if n % MARK_TOKENS == 0), default=0)
        self.rows.head += n_probes(1, last, furthest)
        missing = [n * MARK_TOKENS for n in range(furthest + 1, last + 1)]
        for n in (*missing, n_tokens):
            self.rows.head += 1
            if n not in marks:
                marks[n] = tuple(run for run in runs if run.p0 < n + MARK_TOKENS)
                self.rows.store("marks", self._mark_bytes(marks[n]))

    def _put_object(self, run: RowsRun, path: TokenPath) -> None:
        self.rows.head += 1
        if run.number not in self._paths:
            self.rows.head += int(self._parts(run) > 1)
            self._paths[run.number] = path
            for sealed in self._part_bytes(run):
                self.rows.store("objects", sealed)

    def _put_record(self, kind: str, record: Record) -> None:
        self.records.head += 1
        self.records.store(kind, len(encode(record)) + SEAL_BYTES)

    def _heads(self) -> None:
        """The records of the session are listed, and the last is read, which contains the others."""
        self.records.list += 1
        if self._record_bytes:
            self.records.get += 1
            self.records.bytes_down += self._record_bytes[-1]

    def _session_record(self, path: TokenPath, turns: int) -> Record:
        rows, others = ([*map(self._place, runs)] for runs in (self._record_runs, self._other_runs))
        return session_record(path.n, turns, rows, others, ["0" * 16] * len(self._record_bytes))

    def _fetch(self, runs: Sequence[RowsRun], path: TokenPath, n_stored: int) -> None:
        for run in runs:
            if n_stored < run.p0 or run.p0 >= path.n:
                break
            if n_stored >= min(run.p1, path.n):
                continue
            end = min(run.p1, max(run.p0, path.common(self._paths[run.number])))
            if end <= n_stored:
                self._get(self._part_bytes(run)[0])  # its header says so
                break
            for sealed in self._part_bytes(run):
                self._get(sealed)
            self.rows.tokens_fetched += end - n_stored
            n_stored = end

    def _get(self, n_bytes: int) -> None:
        self.rows.get += 1
        self.rows.bytes_down += n_bytes

    def _mark_bytes(self, runs: Sequence[RowsRun]) -> int:
        """Of a mark, sealed: an array of a version, rows and no bases."""
        head = 1 if len(runs) < 16 else 3
        return SEAL_BYTES + 1 + 1 + head + sum(map(self._place_bytes, runs)) + 1

    def _place_bytes(self, run: RowsRun) -> int:
        return _encoded_bytes(self._place(run))

    def _place(self, run: RowsRun) -> RowsPlace:
        n_bytes = self._object_bytes(run)
        return RowsPlace("0" * 64, run.p0, run.p1, run.is_public, count_parts(n_bytes), n_bytes)

    def _object_bytes(self, run: RowsRun) -> int:
        return _object_bytes(run.p0, run.p1, self._token_bytes)

    def _parts(self, run: RowsRun) -> int:
        return count_parts(self._object_bytes(run))

    def _part_bytes(self, run: RowsRun) -> list[int]:
        """Of each part, sealed."""
        whole, rest = divmod(self._object_bytes(run), PART_BYTES)
        return [PART_BYTES + SEAL_BYTES] * whole + ([rest + SEAL_BYTES] if rest else [])


def n_probes(first: int, last: int, furthest: int) -> int:
    """Marks that are asked for until the furthest of those from `first` to `last` is known: as `Marks` does, the ends
    at once, and then four at once between those that are and are not there."""
    low, high, asked, n = first - 1, last + 1, {first, last}, 0
    while low + 1 < high:
        n += len(asked)
        for number in sorted(asked):
            if number > furthest:
                high = number
                break
            low = number
        between = ((high - low) * part // (_ASKED + 1) for part in range(1, _ASKED + 1))
        asked = {low + each for each in between if each}
    return n


@lru_cache(1 << 16)
def _object_bytes(p0: int, p1: int, token_bytes: int) -> int:
    """Of an object: its header with the ids, and rows."""
    ids, n_bytes = bytes(ID_BYTES * (p1 - p0)), token_bytes * (p1 - p0)
    header = RowsHeader(bytes(32), "", bytes(32), p0, p1, ids, n_bytes, bytes(32), [])
    return 4 + len(encode(header)) + n_bytes


@lru_cache(1 << 16)
def _encoded_bytes(place: RowsPlace) -> int:
    return len(encode(place))
