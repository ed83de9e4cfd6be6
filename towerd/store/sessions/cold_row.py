"""The bytes that the catalog keeps of a frozen session beside its blob, and their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from towerd.codec import varint
from towerd.store.sessions.history import History, PastTurn
from towerd.store.sessions.prefix_hashes import prefix_hashes_at
from towerd.store.sessions.sessions import RECOGNISED_TOKENS_MIN

DIGEST_BYTES = 16


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
