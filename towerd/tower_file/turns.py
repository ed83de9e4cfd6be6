"""The turns and bases of a `.tower` file."""

from __future__ import annotations

from towerd.codec import varint
from towerd.codec.base import IDS_MAX
from towerd.codec.varint import VarintReader
from towerd.store.sessions.history import NamedBase, PastTurn
from towerd.store.sessions.sessions import NAME_CHARS_MAX
from towerd.tower_file.fields import (
    TURNS_MAX,
    TowerFileError,
    contradiction,
    put_text,
    put_time,
    read_flag,
    read_text,
    read_time,
)

TURN_IDS_MAX = 1 << 28
"""Maximum number of token ids of all turns together, each counted with its whole prompt."""
_TURN_NUMBERS = 6
_DIGEST_BYTES = 32


def put_bases(bases: tuple[NamedBase, ...]) -> bytes:
    """The bases that the current branch begins with."""
    parts = [varint.put(len(bases))]
    for base in bases:
        parts += [put_text(base.name), varint.put_all((base.level, base.n_tokens)), base.digest]
    return b"".join(parts)


def read_bases(reader: VarintReader) -> tuple[NamedBase, ...]:
    """The inverse of `put_bases`."""
    found = []
    for _ in range(reader.number()):
        name, (level, n_tokens) = read_text(reader, NAME_CHARS_MAX), reader.numbers(2)
        found.append(NamedBase(name, level, n_tokens, reader.take(_DIGEST_BYTES)))
    return tuple(found)


def put_turns(turns: tuple[PastTurn, ...]) -> bytes:
    """The facts of each turn."""
    parts = [varint.put(len(turns))]
    for place, turn in enumerate(turns):
        parent = 0 if turn.parent is None else place - turn.parent
        numbers = (parent, place - turn.origin, turn.n_shared)
        counts = (turn.n_prompt, turn.n_reply, turn.n_cached)
        times = put_time(turn.started) + put_time(turn.created)
        parts.append(varint.put_all(numbers + counts) + times + bytes((turn.finished,)))
    return b"".join(parts)


def read_turns(reader: VarintReader) -> tuple[PastTurn, ...]:
    """The turns, checked to refer only to earlier turns and to tokens that these have."""
    turns: list[PastTurn] = []
    for place in range(reader.number(TURNS_MAX + 1)):
        parent, origin, n_shared, n_prompt, n_reply, n_cached = reader.numbers(_TURN_NUMBERS)
        before = place - parent if parent else None
        counts = n_prompt, n_reply, n_cached
        started, created, finished = read_time(reader), read_time(reader), read_flag(reader)
        turn = PastTurn(before, place - origin, n_shared, *counts, started, created, finished)
        n_there = turns[turn.origin].n if 0 < origin <= place else 0
        if max(parent, origin) > place or not 0 < turn.n <= IDS_MAX:
            raise contradiction()
        if turn.n_shared > min(turn.n, n_there) or turn.n_cached > turn.n:
            raise contradiction()
        turns.append(turn)
    if not turns:
        raise contradiction()
    return tuple(turns)


def check_size(turns: tuple[PastTurn, ...]) -> None:
    """TowerFileError for more than a file holds."""
    n_ids = sum(turn.n for turn in turns)
    if len(turns) > TURNS_MAX or n_ids > TURN_IDS_MAX:
        raise TowerFileError(
            f"The session has {len(turns)} turns with {n_ids} tokens, and a .tower file holds up "
            f"to {TURNS_MAX} turns and {TURN_IDS_MAX} tokens."
        )
