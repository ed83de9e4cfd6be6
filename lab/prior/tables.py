"""N-gram tables: the tokens that followed the last k tokens in a corpus, pruned to a size.

A context is named by a chained hash of its tokens, latest first (`hashes`, the same function as
`context_hash` in kernels/cpp/mix.h). A table is buckets of lists: head (10 bits of the hash
and the length of the list; 63: the length follows), then entries in order of token (12 bits of
token, 4 of its count's row in COUNTS). A context stays if it saves enough bits for its bytes,
compared with the context one token shorter: entropy pruning (Stolcke 1998) of whole contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 1024, 4096, 16384)
CONTEXTS_PER_BUCKET = 4
"""Maximum mean number of contexts per bucket. There are 2^k buckets, each with 4 bytes of index."""
ORDERS = 5
TOKENS_MAX = 4096
LENGTH_MAX = 62
"""Lists up to this length have their length in the head."""
_TOKEN = np.uint64(TOKENS_MAX - 1)
_LOSS = 0.8
"""Occurrences of an entry that do not count as gain, because the entry was chosen by them."""

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass
class Counts:
    """How often each (context, token) occurs. `keys` ascend: context hash with the token in its
    lowest 12 bits; `contexts` and `starts` are the distinct contexts and their first key."""

    keys: U64
    n: U32
    worth: F32
    """Per key: the total worth of its occurrences."""
    contexts: U64
    starts: npt.NDArray[np.int64]
    shorter: U64
    """Per context: the hash of the context without its oldest token."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Keys per context."""
        return np.diff(np.append(self.starts, len(self.keys)))

    @property
    def totals(self) -> npt.NDArray[np.int64]:
        """Occurrences per context."""
        return np.add.reduceat(self.n.astype(np.int64), self.starts)


def extended(hashes: U64, tokens: U32) -> U64:
    """Hashes of contexts that are one token longer: `tokens` are the next older ones."""
    mixed = (hashes ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0xBF58476D1CE4E5B9)


def count(ranks: U32, order: int, worth: F32 | None = None) -> Counts:
    """Counts of every context of `order` tokens that occurs twice (order 1: at all).

    `worth` float32[n]: the value of predicting each token; 1 if None."""
    n = len(ranks)
    context = np.zeros(n - order, np.uint64)
    shorter = context
    for back in range(1, order + 1):
        shorter, context = context, extended(context, ranks[order - back : n - back])
    sortable = context & ~_TOKEN | ranks[order:].astype(np.uint64)
    order_of = np.argsort(sortable)
    ordered = sortable[order_of]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    keys, times = ordered[first], np.diff(np.append(first, len(ordered))).astype(np.uint32)
    starts = np.flatnonzero(np.append(True, (keys[1:] ^ keys[:-1]) & ~_TOKEN != 0))
    at = order_of[first[starts]]
    each = times.astype(np.float32)
    if worth is not None:
        each = np.add.reduceat(worth[order:][order_of], first)
    counts = Counts(keys, times, each, context[at], starts, shorter[at])
    return _frequent(counts, 2 if order > 1 else 1)


def _frequent(counts: Counts, least: int) -> Counts:
    """The contexts that occur at least `least` times."""
    return _selected(counts, counts.totals >= least, np.ones(len(counts.keys), np.bool_))


def _selected(counts: Counts, contexts: Bools, entries: Bools) -> Counts:
    """The selected contexts and entries, without contexts that have no entries left."""
    owner = np.repeat(np.arange(len(counts.starts)), counts.lengths)
    entries = entries & contexts[owner]
    left, starts = np.unique(owner[entries], return_index=True)
    return Counts(
        counts.keys[entries],
        counts.n[entries],
        counts.worth[entries],
        counts.contexts[left],
        starts.astype(np.int64),
        counts.shorter[left],
    )


def gains(counts: Counts, lower: Counts, least: int) -> tuple[npt.NDArray[np.float64], Bools]:
    """(worth of the bits saved per byte by each context over its shorter one, entries that occur
    `least` times)."""
    owner = np.repeat(np.arange(len(counts.starts)), counts.lengths)
    key = counts.shorter[owner] & ~_TOKEN | counts.keys & _TOKEN
    at = np.minimum(np.searchsorted(lower.keys, key), len(lower.keys) - 1)
    n_lower = np.where(lower.keys[at] == key, lower.n[at], 0)
    tops = lower.contexts & ~_TOKEN
    context = np.minimum(np.searchsorted(tops, counts.shorter & ~_TOKEN), len(tops) - 1)
    size_lower = (lower.totals + lower.lengths)[context] + 1
    size = counts.totals + counts.lengths
    ratio = (counts.n / size[owner]) / ((n_lower + 0.01) / size_lower[owner])
    kept = counts.n >= least
    saved = np.where(kept, counts.worth * (1 - _LOSS / counts.n) * np.log2(ratio), 0)
    return np.add.reduceat(saved, counts.starts) / _sizes(counts, kept), kept


def _sizes(counts: Counts, kept: Bools) -> npt.NDArray[np.float64]:
    """Bytes that each context takes in a table: its head, its share of the index, its entries."""
    return 2 + 6 / CONTEXTS_PER_BUCKET + 2 * np.add.reduceat(kept.astype(np.int64), counts.starts)


def pack(counts: Counts, n_tokens: int, order: int) -> tuple[U32, U16]:
    """(index, data) of a table, as lab/reference/mix.py reads it."""
    rows = np.searchsorted(np.array(COUNTS), counts.n, side="right") - 1
    entries = ((counts.keys & _TOKEN) << np.uint64(4) | rows.astype(np.uint64)).astype(np.uint16)
    if order == 1:
        return _pack_first(counts, entries, n_tokens)
    n_contexts = max(1, len(counts.contexts))
    n_buckets = 1 << max(0, int(np.ceil(np.log2(n_contexts / CONTEXTS_PER_BUCKET))))
    bucket = (counts.contexts >> np.uint64(32)) & np.uint64(n_buckets - 1)
    turn = np.argsort(bucket, kind="stable")
    lengths = counts.lengths
    heads = (counts.contexts >> np.uint64(12) & np.uint64(1023)) << np.uint64(6)
    heads |= np.minimum(lengths, LENGTH_MAX + 1).astype(np.uint64)
    sizes = lengths + 1 + (lengths > LENGTH_MAX)
    data = np.zeros(int(sizes.sum()), np.uint16)
    at = np.cumsum(sizes[turn]) - sizes[turn]
    data[at] = heads[turn]
    long = lengths[turn] > LENGTH_MAX
    data[at[long] + 1] = lengths[turn][long]
    begin = at + 1 + long
    within = np.arange(len(entries)) - np.repeat(
        np.cumsum(lengths[turn]) - lengths[turn], lengths[turn]
    )
    data[np.repeat(begin, lengths[turn]) + within] = entries[
        np.repeat(counts.starts[turn], lengths[turn]) + within
    ]
    per_bucket = np.zeros(n_buckets + 1, np.int64)
    np.add.at(per_bucket, bucket.astype(np.int64) + 1, sizes)
    return np.cumsum(per_bucket).astype(np.uint32), data


def _pack_first(counts: Counts, entries: U16, n_tokens: int) -> tuple[U32, U16]:
    """Order 1 has a bucket for each token, so it needs no heads."""
    every = extended(np.zeros(n_tokens, np.uint64), np.arange(n_tokens, dtype=np.uint32))
    index, parts = np.zeros(n_tokens + 1, np.uint32), []
    place = {int(context): i for i, context in enumerate(counts.contexts)}
    lengths = counts.lengths
    for token, context in enumerate(every):
        i = place.get(int(context))
        if i is not None:
            parts.append(entries[counts.starts[i] : counts.starts[i] + lengths[i]])
        index[token + 1] = index[token] + (lengths[i] if i is not None else 0)
    return index, np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def build(
    ranks: U32, n_tokens: int, bytes_max: int, least: int = 2, worth: F32 | None = None
) -> list[tuple[U32, U16]]:
    """Tables of orders 1 to ORDERS of a corpus, together about `bytes_max` bytes. `worth`: see
    `count`.

    Takes 70 bytes of memory per token of the corpus."""
    if n_tokens > TOKENS_MAX:
        raise ValueError(f"Tables are for at most {TOKENS_MAX} tokens, not {n_tokens}.")
    found = [count(ranks, 1, worth)]
    rated = []
    for order in range(2, ORDERS + 1):
        found.append(count(ranks, order, worth))
        rated.append(gains(found[-1], found[-2], least))
    first = _selected(found[0], np.ones(len(found[0].starts), np.bool_), found[0].n >= least)
    tables = [pack(first, n_tokens, 1)]
    rates = np.concatenate([rate for rate, _ in rated])
    sizes = np.concatenate(
        [_sizes(counts, kept) for (_, kept), counts in zip(rated, found[1:], strict=True)]
    )
    turn = np.argsort(-rates)
    n_kept = int(np.searchsorted(np.cumsum(sizes[turn]), bytes_max - tables[0][1].nbytes))
    threshold = rates[turn[min(n_kept, len(turn) - 1)]]
    for order, ((rate, kept), counts) in enumerate(zip(rated, found[1:], strict=True), start=2):
        tables.append(pack(_selected(counts, rate > threshold, kept), n_tokens, order))
    return tables
