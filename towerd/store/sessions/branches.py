"""Two copies of one session that continued apart, put together: each turn of either is there once.

A turn is the same in both if its tokens, counts and times are. Those that only one copy has become branches, as an
edited prompt does.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np

from towerd.store.sessions.history import History

DIGEST_BYTES = 16
_FACTS = struct.Struct("<QQdd?")


def turn_digests(history: History) -> list[bytes]:
    """What tells each turn from all others of its session, on any machine: DIGEST_BYTES of BLAKE2b."""
    found = []
    for place, turn in enumerate(history.turns):
        facts = turn.n_prompt, turn.n_reply, turn.started, turn.created, turn.finished
        data = _FACTS.pack(*facts) + history.ids(place).tobytes()
        found.append(hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest())
    return found


def merged(mine: History, other: History) -> History:
    """`mine` with the turns of another copy of the session that it lacks. Its current branch stays, unless that of
    `other` continues it."""
    known = {digest: place for place, digest in enumerate(turn_digests(mine))}
    turns, stream = list(mine.turns), [mine.stream]
    places: list[int] = []
    """Where each turn of `other` is."""
    for place, digest in enumerate(turn_digests(other)):
        at, turn = known.get(digest, len(turns)), other.turns[place]
        if at == len(turns):
            parent = None if turn.parent is None else places[turn.parent]
            origin = at if turn.origin == place else places[turn.origin]
            turns.append(replace(turn, parent=parent, origin=origin))
            stream.append(other.stream[other.starts[place] : other.starts[place + 1]])
        places.append(at)
    continues = mine.leaf in {places[place] for place in other.branch()}
    return replace(
        mine,
        updated=max(mine.updated, other.updated),
        leaf=places[other.leaf] if continues else mine.leaf,
        turns=tuple(turns),
        stream=np.concatenate(stream),
    )
