"""A session on its way into the cold tier, and one that is there; what the catalog keeps of it beside its
blob, with the checksum of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from towerd.codec import varint
from towerd.codec.errors import CodecError
from towerd.errors import StoreError, ThawError
from towerd.store.sessions.history import History, HistoryCopy, PastTurn, beginning
from towerd.store.sessions.prefix_hashes import prefix_hashes_at
from towerd.store.sessions.sessions import RECOGNISED_TOKENS_MIN, SessionRow, SessionTable
from towerd.store.sessions.turn import Base, SessionInfo
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.tokens import Ids, ids_array

DIGEST_BYTES = 16
_FACTS = ("id", "parent", "n_prompt", "n_reply", "n_cached", "started", "created", "finished")
_PREFIX_HASHES = (
    "SELECT session, marks FROM cold JOIN sessions ON pk = session"
    " WHERE frozen = 1 AND tokenizer = ? AND (? IS NULL OR session = ?)"
)


def encode_turns(ids: Sequence[int], turns: Sequence[PastTurn]) -> bytes:
    """The facts about a blob's turns that the catalog lacks, as varints: their number, and for each
    the difference of its id to the one before, turns back to its origin, tokens shared with it."""
    out = [varint.put(len(ids))]
    before = 0
    for place, (id, turn) in enumerate(zip(ids, turns, strict=True)):
        out.append(varint.put_all((id - before, place - turn.origin, turn.n_shared)))
        before = id
    return b"".join(out)


def decode_turns(data: bytes) -> list[tuple[int, int, int]]:
    """(id, place of its origin, tokens shared) of each turn. Raises CodecError."""
    reader = varint.VarintReader(data)
    found, id = [], 0
    for place in range(reader.number()):
        step, back, n_shared = reader.numbers(3)
        id += step
        found.append((id, place - back, n_shared))
    reader.end()
    return found


def turn_ends(turns: Iterable[tuple[int, int]]) -> list[int]:
    """The positions at which the prompts and replies of turns (n_prompt, n_cached) end, as far as
    they are cached; ascending, without duplicates."""
    ends = {end for n_prompt, n_cached in turns for end in (min(n_prompt, n_cached), n_cached)}
    return sorted(end for end in ends if end >= RECOGNISED_TOKENS_MIN)


def history_prefix_hashes(history: History, scope: str) -> bytes:
    """The prefix hashes of a session, for `PrefixHashIndex`: one per end of a prompt or reply."""
    found: set[int] = set()
    for place, turn in enumerate(history.turns):
        ends = turn_ends([(turn.n_prompt, turn.n_cached)])
        if ends:
            found.update(prefix_hashes_at(history.ids(place).tobytes(), scope, ends))
    return encode_prefix_hashes(found)


def encode_prefix_hashes(hashes: Iterable[int]) -> bytes:
    """The stored form of prefix hashes: uint64 LE, ascending."""
    return np.array(sorted(hashes), "<u8").tobytes()


def row_digest(n_base: int, turns: bytes, marks: bytes, blob: bytes) -> bytes:
    """The checksum of a frozen session's bytes: BLAKE2b-128 of all of them."""
    h = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (varint.put(n_base), turns, marks, blob):
        h.update(varint.put(len(part)) + part)
    return h.digest()


@dataclass(frozen=True, slots=True)
class WarmSession:
    """A session that can be frozen, in the state in which it was read."""

    session: SessionRow
    taken: HistoryCopy
    base: Node | None
    """The end of the tokens that its blob will follow."""
    n_base: int
    """How many of these its history begins with."""

    @property
    def turn_ids(self) -> list[int]:
        """The ids of all turns, oldest first."""
        return [row[0] for row in self.taken.turns]


@dataclass(frozen=True, slots=True)
class FrozenSession:
    """A frozen session as stored; `stream` is that of its history."""

    session: SessionRow
    info: SessionInfo
    base: Ids
    """int32[n]: the tokens that the blob follows."""
    n_base: int
    """How many of these the history begins with: fewer than all where `base` is a prompt like its own."""
    turns: bytes
    blob: bytes
    rows: list[tuple[Any, ...]]
    """The catalog row of each turn."""
    bases: list[Base]
    """The bases that its tenant's sessions may begin with."""
    digest: bytes
    """Changes whenever the session is frozen or recoded."""

    @property
    def was_continued(self) -> bool:
        """Whether it has turns that the blob lacks, because it could not be thawed for them."""
        return len(self.rows) > len(self.turn_ids())

    @property
    def beginning(self) -> Ids:
        """The first tokens of its history, which the blob does not have."""
        return self.base[: self.n_base]

    def stream(self, own: Ids) -> Ids:
        """The stream of its history, of the decoded blob."""
        return np.concatenate([self.beginning, own])

    def history(self, stream: Ids) -> History:
        """The session, once its tokens are known. Raises ThawError if they are too few."""
        history = self.outline(len(stream))
        history = replace(history, stream=stream)
        return replace(history, bases=beginning(history.ids(history.leaf).tobytes(), self.bases))

    def outline(self, n_tokens: int) -> History:
        """The session without its tokens, of which there are so many, and without the names of its
        bases. Raises ThawError if there should be more or fewer."""
        turns = self._turns()
        wanted = sum(turn.n - turn.n_shared for _, turn in turns)
        if wanted != n_tokens:
            raise damaged_session(
                self.info.id, f"its turns have {wanted} tokens and its blob {n_tokens}"
            )
        places = {id: place for place, (id, _) in enumerate(turns)}
        leaf = places.get(self.info.leaf or 0, len(turns) - 1)
        info = self.info
        past = tuple(turn for _, turn in turns)
        return History(
            info.id,
            info.named,
            info.title,
            info.created,
            info.updated,
            leaf,
            past,
            (),
            ids_array(b""),
        )

    def turn_ids(self) -> list[int]:
        """The ids of the turns in the blob, oldest first."""
        return [id for id, _ in self._turns()]

    def _turns(self) -> list[tuple[int, PastTurn]]:
        known = {row[0]: row[1:] for row in self.rows}
        places: dict[int, int] = {}
        found: list[tuple[int, PastTurn]] = []
        try:
            decoded = decode_turns(self.turns)
        except CodecError as error:
            raise damaged_session(self.info.id, str(error)) from error
        for place, (id, origin, n_shared) in enumerate(decoded):
            if id not in known:
                raise damaged_session(self.info.id, f"its turn {id} is gone from the catalog")
            parent, n_prompt, n_reply, n_cached, started, created, finished = known[id]
            n = n_prompt + n_reply
            n_origin = found[origin][1].n if 0 <= origin < place else 0
            if not (0 <= n_prompt <= n and 0 <= n_cached <= n and n_shared <= min(n, n_origin)):
                raise damaged_session(self.info.id, f"its turn {id} does not fit those before it")
            places[id] = place
            before, is_done = places.get(parent), bool(finished)
            turn = PastTurn(
                before, origin, n_shared, n_prompt, n_reply, n_cached, started, created, is_done
            )
            found.append((id, turn))
        return found


def damaged_session(id: str, what: str) -> ThawError:
    """The error for a frozen session that cannot be read."""
    return ThawError(
        f"Session {id!r} cannot be thawed: {what.rstrip('.')}; put back a copy of the store's "
        "catalog, or remove the session and import it."
    )


class SessionBusy(StoreError):
    """A session cannot be frozen now; nothing was changed."""

    status = 409
    kind = "invalid_request_error"
    stands_for = ""


@dataclass(frozen=True, slots=True)
class CodedSession:
    """A session that has a blob, be it frozen or not."""

    pk: int
    """Its row, by which sessions are gone through."""
    id: str
    scope: str


def prefix_hash_rows(state: StoreState, session: int | None = None) -> list[tuple[int, bytes]]:
    """(row, prefix hashes as they are stored) of the frozen session of this row, or of all, of the
    open tokenizer. Runs under the lock."""
    return state.catalog.rows(_PREFIX_HASHES, (state.identity.tokenizer, session, session))


def read_coded(
    table: SessionTable,
    session: SessionRow,
    prefix: Callable[[int], bytes],
    bases: Callable[[str], list[Base]],
    *,
    frozen: bool,
) -> FrozenSession | None:
    """A frozen session, or the copy of one that is not; None if there is none. `prefix`: the ids
    (int32 LE) from the root to the end of a segment, empty if it is gone; `bases`: what sessions of
    a scope may begin with. Raises ThawError if it is damaged. Runs under the lock."""
    sealed, pk = table.catalog.sealed, (session.pk,)
    rows = sealed("cold", "session = ? AND frozen = ?", (*pk, int(frozen)))
    blobs = sealed("blobs", "session = ?", pk)
    if not rows or not blobs:
        return None
    turns, marks, digest = (rows[0][name] for name in ("turns", "marks", "digest"))
    base, n_base, blob = rows[0]["base"], rows[0]["n_base"], blobs[0]["blob"]
    ids = ids_array(b"" if base is None else prefix(base))
    is_whole = n_base <= len(ids) and (len(ids) > 0) == (base is not None)
    if not is_whole or row_digest(n_base, turns, marks, blob) != digest:
        raise damaged_session(session.id, "the checksum of its coded tokens does not match")
    stored = sealed("turns", "session = ? ORDER BY id", pk)
    facts = [tuple(turn[name] for name in _FACTS) for turn in stored]
    info = table.info(session)
    return FrozenSession(session, info, ids, n_base, turns, blob, facts, bases(info.scope), digest)
