"""Records in the bucket: where those of a session or base are, which of several is read, and how one is put."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from towerd.errors import InvalidRequest, NotFound, TowerdError
from towerd.slots.errors import StateError
from towerd.store import Store
from towerd.store.tree.scope import adapters_of, is_public, public_of
from towerd.tiers.shared.bucket import BucketError, Listed, ObjectDamaged, ObjectMissing
from towerd.tiers.shared.deleting.free_place import AGAIN
from towerd.tiers.shared.naming import Naming
from towerd.tiers.shared.objects import (
    VERSION,
    BaseRecord,
    PutRows,
    R,
    SessionRecord,
    decode_record,
    encode,
    put_of,
)
from towerd.tiers.shared.records import NamedRecord, RecordName, best_first, short_name
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, ids_array
from towerd.transfer import outline

log = logging.getLogger(__name__)

_LISTED_MAX = 1_000_000
"""Records of all sessions, or of all bases."""
_RECORDS_TRIED = 8
"""Of a session or base, the newest first, until one is whole."""


class SharedRecords:
    """Belongs to the thread that talks with the bucket."""

    def __init__(self, shared: SharedTier, store: Store) -> None:
        self._shared, self._store = shared, store

    def listing(self, scope: str) -> dict[str, Any]:
        sessions, bases = [], []
        for named, of_session, _ in self._readable("sessions", SessionRecord, (scope,)):
            with suppress(InvalidRequest):  # of a newer version
                sessions.append({**outline(of_session.tower), **_told(named)})
        for named, base, of in self._readable("bases", BaseRecord, (scope, public_of(scope))):
            bases.append(
                {
                    "name": base.name,
                    "public": is_public(of),
                    "tokens": len(ids_array(base.ids)),
                    **_told(named),
                }
            )
        newest: dict[str, Any] = {"key": lambda each: each["put"], "reverse": True}
        return {"sessions": sorted(sessions, **newest), "bases": sorted(bases, **newest)}

    def _readable(
        self, folder: str, kind: type[R], scopes: Sequence[str]
    ) -> Iterator[tuple[NamedRecord, R, str]]:
        """The best record of each session or base in a folder that can be read for one of these scopes, and the scope:
        names tell nobody whose they are."""
        folders: dict[str, list[Listed]] = {}
        for each in self._shared.bucket.listing(folder, _LISTED_MAX):
            folders.setdefault(each.place.rpartition("/")[0], []).append(each)
        for listed in folders.values():
            for scope in scopes:
                best = best_first(listed, self._shared.model_name(scope))[:1]
                data = self._shared.own_record(scope, best[0].place) if best else None
                if data is not None:
                    with suppress(StateError):
                        yield best[0], decode_record(data, kind), scope
                    break

    def session_folder(self, id: str, scope: str) -> str:
        return f"sessions/{self._shared.keys(scope).name('session', id.encode())}"

    def base_folder(self, name: str, scope: str) -> str:
        digest = self._store.state.identity.tokenizer_digest
        return f"bases/{self._shared.keys(scope).name('base', digest, name.encode())}"

    def common(self, put: PutRows, scope: str) -> dict[str, Any]:
        return {
            "version": VERSION,
            "row_identity": self._store.state.digest,
            "adapters": adapters_of(scope),
            "rows": put.rows,
            "transform_bases": put.transform_bases,
            "checkpoints": put.checkpoints,
        }

    def text(self, data: bytes, scope: str) -> str:
        return short_name(self._shared.keys(scope), "text", data)

    def put_lately(self, found: Sequence[NamedRecord]) -> list[NamedRecord]:
        """Those that need not be put again to stay."""
        with self._shared.held() as hold:
            now = hold.now() if found else None
        return [each for each in found if now is not None and now - each.modified < AGAIN]

    def put_record(
        self,
        folder: str,
        version: int,
        text: str,
        record: SessionRecord | BaseRecord,
        scope: str,
        named: Naming,
    ) -> None:
        data, n_rows = encode(record), put_of(record).n_tokens
        content, model = (
            self._shared.keys(scope).name("record", data),
            self._shared.model_name(scope),
        )
        name = RecordName(version, text, model, n_rows, content)
        self._shared.put_record(scope, folder, name, data, named)

    def listed(self, folder: str, scope: str) -> list[NamedRecord]:
        """Those of a folder, the best for this daemon first. Raises BucketError."""
        return best_first(self._shared.bucket.listing(folder), self._shared.model_name(scope))

    def read(self, listed: Sequence[NamedRecord], scope: str, kind: type[R], what: str) -> R:
        """The first record that is whole. Raises NotFound, BucketError."""
        if not listed:
            raise not_there(what)
        problem: BucketError | None = None
        for each in listed[:_RECORDS_TRIED]:
            try:
                return decode_record(self._shared.read_record(scope, each.place), kind)
            except (ObjectDamaged, ObjectMissing) as error:
                problem = problem or error
            except StateError as error:
                problem = problem or BucketError(f"The record of {what} cannot be used: {error}.")
        assert problem is not None
        raise problem

    def fetch(
        self, record: SessionRecord | BaseRecord, ids: Ids, scope: str, since: Any = None
    ) -> int:
        """Fetch the rows of a record, and those that others put of its tokens; returns the tokens that have some
        here."""
        put = put_of(record)
        try:
            if record.row_identity == self._store.state.digest:
                self._shared.fetch_path(put, ids, scope, since)
            n_stored = self._shared.n_stored(ids, scope)
            if n_stored < len(ids) - 1:  # the last token may have no row
                others = self._shared.find(ids, scope, n_stored)
                if others is not None:
                    self._shared.fetch_path(others.put, ids, scope, since)
        except TowerdError as error:  # what has come stays
            self._shared.counters.add(errors=int(isinstance(error, BucketError)))
            log.warning("rows were not fetched", extra={"error": error.message})
        return self._shared.n_stored(ids, scope)


def _told(named: NamedRecord) -> dict[str, Any]:
    """What a record's name says of it."""
    return {"rows": named.name.n_rows, "put": named.modified.timestamp()}


def not_there(what: str) -> NotFound:
    return NotFound(
        f"The shared tier has no {what} for this tenant and key: put it there with towerctl shared push, where it is."
    )
