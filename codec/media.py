"""Media among the ids of a blob: pictures and sounds have negative ids, which no token has.

These ids are hashes and cannot be compressed, so a blob stores them as they are, beside the tokens.
The tokens are coded as if there were no media between them.

    varint: runs, then per run varints: tokens before it since the last one, and its ids
    the ids of all runs, int32
"""

from __future__ import annotations

import numpy as np

from towerd.codec import varint
from towerd.codec.errors import Damaged
from towerd.tokens import Ids


def tokens_of(ids: Ids) -> Ids:
    """The ids without the media."""
    return ids[ids >= 0]


def take_out(ids: Ids) -> bytes:
    """The media of `ids`; empty if there are none."""
    inside = ids < 0
    if not inside.any():
        return b""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    gaps = starts - np.concatenate([[0], ends[:-1]])
    pairs = np.stack([gaps, ends - starts], axis=1).reshape(-1)
    runs = varint.put(len(starts)) + varint.put_all(pairs.tolist())
    return runs + ids[inside].astype("<i4").tobytes()


def put_back(tokens: Ids, media: bytes) -> Ids:
    """`tokens` with the media between them. Raises Damaged."""
    if not media:
        return tokens
    pairs, ids = _parsed(media)
    parts, at, taken = [], 0, 0
    for gap, n in pairs:
        parts += [tokens[at : at + gap], ids[taken : taken + n]]
        at, taken = at + gap, taken + n
    if at > len(tokens):
        raise Damaged("The blob is damaged: its media stand where it has no ids.")
    return np.concatenate([*parts, tokens[at:]])


def count(media: bytes) -> int:
    """The number of media ids. Raises Damaged."""
    return len(_parsed(media)[1]) if media else 0


def _parsed(media: bytes) -> tuple[list[tuple[int, int]], Ids]:
    reader = varint.VarintReader(media)
    numbers = reader.numbers(2 * reader.number(len(media)))
    rest = reader.rest()
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    n_ids = sum(n for _, n in pairs)
    if len(rest) != 4 * n_ids:
        raise Damaged("The blob is damaged: its media have other ids than it says.")
    return pairs, np.frombuffer(rest, "<i4").astype(np.int32)
