"""RealTier: the daemon's own naming, sealing and putting over a bucket in memory, which counts the requests.

What the daemon decides itself (`towerd.tiers.shared.tier`: which marks are asked for, in which order) is repeated
here, since it needs a store and a model; names, parts, marks and records are its own code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

import numpy as np
from obstore.store import MemoryStore

from lab.scale.requests import CountingBucket, Requests
from lab.scale.work import RowsRun, TokenPath
from towerd.tiers.shared.marks import Marks
from towerd.tiers.shared.objects import (
    RECORD_BYTES_MAX,
    VERSION,
    BaseRecord,
    PutRows,
    Record,
    RowsHeader,
    RowsPlace,
    SessionRecord,
    count_parts,
    decode_record,
    encode,
    has_object,
    name_and_lead,
    parts_of,
    put_object,
    read_rows,
)
from towerd.tiers.shared.records import RecordName, best_first, short_name
from towerd.tiers.shared.sealing import TenantKeys
from towerd.tokens import ID_BYTES

MODEL = b"m" * 32
TOWER_TOKEN_BYTES = 1
"""Of the `.tower` file in the record of a session, for each token: assumed."""


class RealTier:
    """`requests` are those since it was made. Implements `work.Tier`."""

    def __init__(self, token_bytes: int) -> None:
        """token_bytes: rows of a token"""
        self.requests = Requests()
        self._bucket = CountingBucket(MemoryStore())
        self._bucket.count_in(self.requests)
        self._own, self._public = (TenantKeys.of(bytes(32), name) for name in ("team", "public"))
        self._marks = Marks(self._bucket, (MODEL, b"", b"near"))
        self._token_bytes = token_bytes

    def put_base(self, path: TokenPath, run: RowsRun) -> None:
        """See Tier."""
        ids, put = _ids(path), PutRows()
        found = self._there(self._public, ids, [path.n])
        assert not found.rows
        put.rows.append(self._put(ids, run))
        self._marks.put(self._public, ids, put)
        folder = f"bases/{self._public.name('base', MODEL, str(path.base).encode())}"
        assert not best_first(self._bucket.listing(folder), "0" * 16)
        self._record(self._public, folder, 1, ids, base_record(path.n, put.rows))

    def put_session(
        self, session: int, path: TokenPath, runs: Sequence[RowsRun], turns: int
    ) -> None:
        """See Tier."""
        ids = _ids(path)
        found = self._there(self._own, ids, [run.p1 for run in runs])
        for run in runs:
            if run.p1 > found.n_tokens:
                found.rows.append(self._put(ids, run))
        self._marks.put(self._own, ids[: found.n_tokens * ID_BYTES], found)
        folder = self._folder(session)
        self._record(self._own, folder, turns, ids, session_record(path.n, found.rows))

    def look_up(self, path: TokenPath, n_known: int) -> None:
        """See Tier."""
        ids = _ids(path)
        found = [self._marks.find(keys, ids, n_known) for keys in (self._own, self._public)]
        best = max(
            (mark for mark in found if mark is not None),
            key=lambda mark: (mark.n_tokens, mark.put.n_tokens),
            default=None,
        )
        if best is not None:
            self._fetch(best.put.rows, ids, n_known)

    def pull(self, session: int, path: TokenPath, n_known: int) -> None:
        """See Tier."""
        records = best_first(self._bucket.listing(self._folder(session)), "0" * 16)
        place = records[0].place
        data = self._own.unseal(place, self._bucket.get(place, RECORD_BYTES_MAX))
        self._fetch(decode_record(data, SessionRecord).rows, _ids(path), n_known)

    def _there(self, own: TenantKeys, ids: bytes, stored: Sequence[int]) -> PutRows:
        n = len(ids) // ID_BYTES
        for end in sorted({*stored, n - 1, n} - {0}, reverse=True):
            for keys in (own, self._public):
                mark = self._marks.at(keys, ids, end)
                if mark is not None:
                    inside = takewhile(lambda place, at=end: place.p1 <= at, mark.put.rows)  # type: ignore[misc]
                    rows = takewhile(lambda place: has_object(self._bucket, place), inside)
                    return PutRows(list(rows))
        return PutRows()

    def _put(self, ids: bytes, run: RowsRun) -> RowsPlace:
        keys = self._public if run.is_public else self._own
        own = ids[run.p0 * ID_BYTES : run.p1 * ID_BYTES]
        data = memoryview(bytes(self._token_bytes * run.n_tokens))
        chain = hashlib.blake2b(ids[: run.p1 * ID_BYTES], digest_size=32).digest()
        digest = hashlib.blake2b(data, digest_size=32).digest()
        header = RowsHeader(MODEL, "", chain, run.p0, run.p1, own, len(data), digest, [])
        name, lead = name_and_lead(keys, header)
        put_object(self._bucket, keys, name, lead, data)
        n_bytes = len(lead) + len(data)
        return RowsPlace(name, run.p0, run.p1, run.is_public, count_parts(n_bytes), n_bytes)

    def _fetch(self, rows: Sequence[RowsPlace], ids: bytes, n_stored: int) -> None:
        n = len(ids) // ID_BYTES
        for place in rows:
            if n_stored < place.p0 or place.p0 >= n:
                break
            if n_stored >= min(place.p1, n):
                continue
            keys = self._public if place.is_public else self._own
            found = read_rows(keys, place.name, parts_of(self._bucket, keys, place.name))
            mine = np.frombuffer(ids[place.p0 * ID_BYTES : place.p1 * ID_BYTES], np.int32)
            theirs = np.frombuffer(found.header.ids, np.int32)[: len(mine)]
            differs = np.flatnonzero(mine != theirs)
            end = place.p0 + (int(differs[0]) if len(differs) else len(mine))
            if end <= n_stored:
                break
            assert sum(len(part) for part in found.data) == found.header.n_bytes
            self.requests.tokens_fetched += end - n_stored
            n_stored = end

    def _folder(self, session: int) -> str:
        return f"sessions/{self._own.name('session', str(session).encode())}"

    def _record(
        self, keys: TenantKeys, folder: str, version: int, ids: bytes, record: Record
    ) -> None:
        data = encode(record)
        content, text = keys.name("record", data), short_name(keys, "text", ids)
        name = RecordName(version, text, "0" * 16, record.rows[-1].p1, content)
        place = f"{folder}/{name}"
        if not self._bucket.has(place):
            self._bucket.put(place, keys.seal(place, data))


def session_record(n_tokens: int, rows: list[RowsPlace]) -> SessionRecord:
    """The record of a session of so many tokens."""
    return SessionRecord(
        version=VERSION,
        row_identity=MODEL,
        adapters="",
        rows=rows,
        transform_bases=[],
        tower=bytes(TOWER_TOKEN_BYTES * n_tokens),
    )


def base_record(n_tokens: int, rows: list[RowsPlace]) -> BaseRecord:
    """The record of a base of so many tokens."""
    return BaseRecord(
        version=VERSION,
        row_identity=MODEL,
        adapters="",
        rows=rows,
        transform_bases=[],
        name="base",
        level=0,
        tokenizer=MODEL,
        ids=bytes(ID_BYTES * n_tokens),
        format=None,
        reuse="",
    )


def _ids(path: TokenPath) -> bytes:
    at, found = 0, []
    for piece in path.pieces:
        found.append(_random(piece.number, piece.end)[at * ID_BYTES : piece.end * ID_BYTES])
        at = piece.end
    return b"".join(found)


@lru_cache(256)
def _random(number: int, n: int) -> bytes:
    """The first ids of a piece are the same whatever its length."""
    return np.random.default_rng(max(0, number)).integers(0, 1 << 30, n, np.int32).tobytes()
