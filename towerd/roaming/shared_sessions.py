"""Sessions in the bucket: a record holds the `.tower` file, and says which objects its rows are in.

Records are made anew after each turn, with the turns of all that are there: a session that two machines continued has
two branches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from towerd.cold.coding import SessionModel
from towerd.errors import InvalidRequest, NotFound, SessionFrozen, ThawError
from towerd.roaming.shared_records import SharedRecords, not_there
from towerd.store import History, Store
from towerd.store.sessions.branches import merged, turn_digests
from towerd.store.tree.scope import scope_of, tenant_of
from towerd.tiers.shared.heads import Head, Heads, read_heads
from towerd.tiers.shared.naming import naming
from towerd.tiers.shared.objects import PutRows, SessionRecord, decode_record, put_of
from towerd.tiers.shared.records import NamedRecord
from towerd.tiers.shared.tier import SharedTier
from towerd.transfer import history_in, import_session, session_file, session_history

log = logging.getLogger(__name__)

T = TypeVar("T")


class SharedSessions:
    """Belongs to the thread that talks with the bucket."""

    def __init__(
        self,
        shared: SharedTier,
        store: Store,
        records: SharedRecords,
        model: Callable[[], SessionModel],
        flush: Callable[[], object],
    ) -> None:
        """model: the one that `.tower` files are coded with
        flush: writes the rows that are only in RAM"""
        self._shared, self._store, self._records = shared, store, records
        self._model, self._flush = model, flush

    def push(self, id: str, scope: str | None, more: PutRows | None = None) -> dict[str, Any]:
        """Put a session; see `Roaming.push_session`. more: rows of other branches, which the record is to name"""
        self._flush()  # rows may be only in RAM
        scope = self._store.session(id, scope).scope
        self._shared.start_writing()  # before records are read whose rows may be named again
        model, folder = self._model(), self._records.session_folder(id, scope)
        here = session_history(self._store, model, id, scope)
        put = own = self._shared.put_path(here.ids(here.leaf), scope)
        listed = self._records.listed(folder, scope)
        union = _union(model, here, self._heads(listed, scope).found)
        history, ids = union.history, union.history.ids(union.history.leaf)
        others = self._named(union.heads, more or PutRows())
        if history.leaf != here.leaf:  # it continued elsewhere
            others = _both(others, put)
            put = self._shared.put_path(ids, scope)
        known = {each.chain for each in put.checkpoints}
        states = [
            each
            for each in self._shared.states_of(others.checkpoints, ids, scope)
            if each.position <= put.n_tokens and each.chain not in known
        ]
        states = sorted([*put.checkpoints, *states], key=lambda each: each.position)
        put = PutRows(put.rows, put.transform_bases, states)
        text = self._records.text(b"".join(sorted(union.digests)), scope)
        record = SessionRecord(
            **self._records.common(
                PutRows(put.rows, _both(others, put).transform_bases, states), scope
            ),
            tower=session_file(self._store, model, history),
            turns=sorted(union.digests),
            contains=sorted((union.contained & {each.name.text for each in listed}) - {text}),
            others=_apart(others.rows, put.rows, lambda each: each.name, lambda each: each.p0),
            other_checkpoints=_apart(
                others.checkpoints, states, lambda each: each.chain, lambda each: each.position
            ),
        )
        named = naming(
            _both(put_of(record), PutRows(record.others, [], record.other_checkpoints)).objects,
            union.digests,
            [union.digests[place] for place in history.branch()],
            [each.chain for each in (*record.checkpoints, *record.other_checkpoints)],
            self._shared.way(ids, scope, put),
        )
        self._records.put_record(folder, len(union.digests), text, record, scope, named)
        ids = here.ids(here.leaf)
        self._shared.kept(ids, scope, own)
        return {"session": id, "tokens": len(ids), "rows": min(put.n_tokens, len(ids))}

    def _named(self, heads: Sequence[Head], more: PutRows) -> PutRows:
        """`more`, and what records name of this model and is not about to go."""
        for record in (head.record for head in heads):
            if record.row_identity == self._store.state.digest:
                others = PutRows(record.others, [], record.other_checkpoints)
                more = _both(more, _both(put_of(record), others))
        return self._shared.lasting(more)

    def pull(self, id: str, scope: str) -> dict[str, Any]:
        """Take a session; see `Roaming.pull_session`."""
        since, what = self._store.deletions.watch(), f"session {id!r}"
        heads = self._heads(
            self._records.listed(self._records.session_folder(id, scope), scope), scope
        )
        if not heads.found:
            raise heads.problem or not_there(what)
        model, before = self._model(), self._leaf(id, scope)
        done, problem = [], None
        for head in heads.found:
            try:
                tower = head.record.tower
                entered = import_session(self._store, model, tower, tenant_of(scope), since)
                done.append((head.record, entered))
            except (InvalidRequest, SessionFrozen, ThawError) as error:
                problem = problem or error  # the other branches may be sound
        if not done:
            assert problem is not None
            raise problem
        own = [each for each in done if not each[1]["session"]["tokenizer"]]
        last, n_rows = (own or done)[-1][1], 0
        session = last["session"]
        for record, _ in own:
            path = scope_of(tenant_of(scope), record.adapters)
            ids = self._store.session_ids(id, session["scope"])
            n_rows = max(n_rows, self._records.fetch(record, ids, path, since))
        added = sum(entered["added"] for _, entered in own or done)
        is_branch = added > 0 and before is not None and before == session["leaf"]
        found = {"added": added, "branched": is_branch, "tokens": session["n_tokens"]}
        return {**last, **found, "rows": n_rows}

    def _leaf(self, id: str, scope: str) -> int | None:
        """The end of a session's current branch here, if there is one."""
        try:
            return self._store.session(id, tenant_of(scope)).leaf
        except NotFound:
            return None

    def _heads(self, listed: Sequence[NamedRecord], scope: str) -> Heads:
        def read(place: str) -> SessionRecord:
            return decode_record(self._shared.read_record(scope, place), SessionRecord)

        return read_heads(listed, read)


@dataclass(frozen=True, slots=True)
class _Union:
    """A session with the turns of all records of its vocabulary."""

    history: History
    digests: list[bytes]
    """Of its turns."""
    contained: set[str]
    """The texts of records whose turns it has."""
    heads: list[Head]
    """Those of these records that were read."""


def _union(model: SessionModel, history: History, heads: Sequence[Head]) -> _Union:
    contained: set[str] = set()
    digests = turn_digests(history)
    for head in heads:
        record = head.record
        if not record.turns or not {*record.turns} <= {*digests}:
            try:
                other = history_in(model, record.tower)
            except InvalidRequest as error:
                log.warning("a record cannot be used", extra={"error": error.message})
                continue
            if other is None:
                continue  # it stays beside this one
            history = merged(history, other)
            digests = turn_digests(history)
        contained |= {head.text, *record.contains}
    return _Union(history, digests, contained, [head for head in heads if head.text in contained])


def _both(one: PutRows, other: PutRows) -> PutRows:
    """What either names; of one basis the other's place."""
    bases = {each.basis: each for each in (*one.transform_bases, *other.transform_bases)}
    rows, states = [*one.rows, *other.rows], [*one.checkpoints, *other.checkpoints]
    return PutRows(rows, list(bases.values()), states)


def _apart(
    places: Iterable[T],
    known: Iterable[T],
    what: Callable[[T], object],
    where: Callable[[T], int],
) -> list[T]:
    """Those that are of nothing that is known, each once, in order."""
    there = {what(each) for each in known}
    found = {what(each): each for each in places if what(each) not in there}
    return sorted(found.values(), key=lambda each: (where(each), str(what(each))))
