"""Context mixing in Python: the specification of kernels/cpp/mix.cpp, a thousand times slower.

The next token is found by binary decisions down a tree over the vocabulary (tokens in order of
their text, split where the corpus weighs the halves alike). For each decision several models name
a probability, and small online-trained networks mix them in the logistic domain, as PAQ does
(Mahoney, "Adaptive Weighing of Context Models for Lossless Data Compression", 2005):

- how often the node went either way in the corpus, after the last 0 to 5 tokens (`STATIC` tables);
- these orders interpolated over the tokens, as n-gram models do (Chen and Goodman, "An Empirical
  Study of Smoothing Techniques for Language Modeling", 1998): counts are discounted, and the
  probability of tokens that a context does not list goes to the next shorter context;
- how often it went either way since the reset, after the last 0 to 3 tokens and at this kind of
  place in the chat (`DYNAMIC`), as two small counts; the former are interpolated, too;
- what followed where the last tokens were seen before (`MATCHES`);
- the network's distribution over the tokens, if one is given.

Maps learn which probabilities counts stand for. Several sets of weights mix the inputs, each chosen
by another context, such as how unlikely the path was so far, and the results are mixed again. All
arithmetic is on integers (+ - * / of doubles for two tables): all machines agree on every bit.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lab.reference.mix_lanes import (
    MixLanes,
    context_hash,
    mixed_hash,
)
from towerd.kernels._native import mixer_state_size
from towerd.kernels.mixing import (
    DYNAMIC,
    INPUTS,
    LEVELS,
    MATCH_MAX,
    MATCHES,
    SETS,
    STATIC,
)

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 1024, 4096, 16384)
ENTRY, LEAST = (80, 120, 120, 120, 120), 30
"""The weight of a context's unlisted tokens in the interpolation: this much for each listed token,
by order, but at least `LEAST`, in 64ths of an occurrence."""
DISCOUNT = 32
"""The discount of each listed token, in the same unit."""
SESSION = (200, 100, 60)
"""The weight of everything else after the last 1 to 3 tokens of this session, in 16ths."""
SET_ROWS = (96, 0, 80, 0, 1024, 1024)
"""Rows of each set of weights; 0: one per token."""
UNIT, STRETCH_MAX = 170, 2047
RATE, FINAL_RATE = 22, 2

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]


def _squash_table() -> list[int]:
    ratio = term = 1.0
    for i in range(1, 20):
        term *= 1.0 / UNIT / i
        ratio += term
    table, power = [1] * 4096, 1.0
    for i in range(STRETCH_MAX + 1):
        p = min(65535, max(1, int(65536.0 * (power / (1.0 + power)))))
        table[2048 + i], table[2048 - i] = p, 65536 - p
        power *= ratio
    return table


def _stretch_table() -> list[int]:
    table, at = [0] * 65536, 0
    for p in range(32768, 65536):
        while at < STRETCH_MAX and SQUASH[2048 + at] < p:
            at += 1
        table[p] = at
    for p in range(1, 32768):
        table[p] = -table[65536 - p]
    table[0] = -STRETCH_MAX
    return table


SQUASH = _squash_table()
STRETCH = _stretch_table()
RATES = [131072 // (2 * n + 3) for n in range(1024)]


def level(n: int) -> int:
    """A count as one of LEVELS steps of about half an octave."""
    if n < 5:
        return n
    bits = n.bit_length() - 1
    return min(LEVELS - 1, 5 + 2 * (bits - 2) + (n >> (bits - 1) & 1))


@dataclass
class _List:
    """The tokens that followed a context: ranks and running sums, narrowed to the node's tokens."""

    ranks: list[int]
    sums: list[int]
    first: int = 0
    last: int = 0
    split: int = 0
    unlisted: int = 0
    """The weight of all tokens that are not in the list, in 4096ths of an occurrence."""


class Decisions(Protocol):
    """Bits that decisions were written as."""

    def take(self, probability: int) -> int:
        """The next decision, which is 1 with `probability` out of 65536. ValueError for bits that
        no encoder writes."""
        ...


class ReferenceMixer:
    """`weights` uint32[n]: how often each rank occurs; `tables`: (index, data) of orders 1 and up;
    `state` uint32[mixer_state_size(n)]; `kinds` uint8[n]: PLAIN, BREAK or OPENING. Ranks are 0 to n - 1;
    a lane is one of several texts."""

    def __init__(
        self, weights: U32, tables: Sequence[tuple[U32, U16]], state: U32, kinds: U8
    ) -> None:
        """ValueError for a state or kinds of another size."""
        self.n_tokens = len(weights)
        if len(state) != mixer_state_size(self.n_tokens):
            raise ValueError(f"state: expected {mixer_state_size(self.n_tokens)} numbers")
        if len(kinds) != self.n_tokens:
            raise ValueError(f"kinds: expected {self.n_tokens} numbers")
        self.lanes = MixLanes(kinds)
        self.tables = tables
        self.initial: list[int] = state.tolist()
        sums = [0]
        for weight in weights.tolist():
            sums.append(sums[-1] + weight + 1)
        self.tree: list[list[int]] = []
        self._build(0, self.n_tokens, sums)
        sizes = [self.n_tokens, STATIC * LEVELS**2, DYNAMIC * 256, MATCHES * 2 * MATCH_MAX]
        sizes += [(n or self.n_tokens) * INPUTS for n in SET_ROWS]
        starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        _, self.statics, self.dynamics, self.matches, *self.mixers, self.last = starts
        self.reset()

    def _build(self, low: int, high: int, sums: list[int]) -> int:
        if high - low < 2:
            return 0
        ends = sums[low] + sums[high]
        split = min(range(low + 1, high), key=lambda i: abs(2 * sums[i] - ends))
        node = len(self.tree)
        self.tree.append([low, split, high, 0, 0])
        self.tree[node][3] = self._build(low, split, sums)
        self.tree[node][4] = self._build(split, high, sums)
        return node

    def reset(self, lanes: int = 1, table_bits: int = 16) -> None:
        """Go back to the initial state, with `lanes` empty texts."""
        self.values = list(self.initial)
        self.lanes.reset(lanes)
        self.counts, self.checks = [0] * (1 << table_bits), [0] * (1 << table_bits)

    def state(self) -> U32:
        """A copy of everything that was learned."""
        return np.array(self.values, np.uint32)

    def encode(
        self, lane: int, ranks: I32, counts: U32 | None = None
    ) -> tuple[I32, npt.NDArray[np.float64]]:
        """(decisions, probability of 1 for each) of tokens; learns from them."""
        bits, chances = [], []
        for rank in ranks.tolist():
            p = self.begin(lane, counts)
            while p >= 0:
                bits.append(int(rank >= self.tree[self.node][1]))
                chances.append(p / 65536)
                p = self.step(bits[-1])
        return np.array(bits, np.int32), np.array(chances, np.float64)

    def decode(self, lane: int, decoder: Decisions, n: int, counts: U32 | None = None) -> I32:
        """The next `n` tokens of a lane, at most one if `counts` are given; learns from them."""
        ranks = []
        for _ in range(n):
            p = self.begin(lane, counts)
            while p >= 0:
                p = self.step(decoder.take(p))
            ranks.append(-1 - p)
        return np.array(ranks, np.int32)

    def learn(self, lane: int, ranks: I32) -> None:
        """Learn from tokens without coding them."""
        self.encode(lane, ranks)

    def begin(self, lane: int, counts: U32 | None = None) -> int:
        """Start the next token of a lane: P(1) of its first decision, times 65536.

        `counts` uint32[n]: the network's distribution, by rank."""
        self.lane, self.node = lane, 0
        here = self.lanes[lane]
        self.lists = [self.look_up(order, here.history) for order in range(1, STATIC + 1)]
        self.reached = [1 << 28] * (STATIC + 1)
        self.hashes = here.contexts()
        self.predicted = [self.lanes.follows(match) for match in here.matches]
        self.network = [] if counts is None else [0, *np.cumsum(counts, dtype=np.uint64).tolist()]
        return self._evaluate()

    def step(self, bit: int) -> int:
        """Learn a decision; P(1) of the next one times 65536, or -1 - rank after the last."""
        self._learn(bit)
        _, middle, _, left, right = self.tree[self.node]
        child = right if bit else left
        if child:
            self.node = child
            return self._evaluate()
        rank = middle if bit else self.tree[self.node][0]
        self.lanes.append(self.lane, rank)
        return -1 - rank

    def look_up(self, order: int, history: list[int]) -> _List:
        found: list[int] = []
        if order <= len(self.tables) and len(self.tables[order - 1][0]):
            index, data = self.tables[order - 1]
            key = context_hash(history, order)
            bucket = history[-1] if order == 1 else key >> 32 & (len(index) - 2)
            found = data[int(index[bucket]) : int(index[bucket + 1])].tolist()
            if order > 1:
                found = _listed(found, key >> 12 & 1023)
        sums = [0]
        for entry in found:
            sums.append(sums[-1] + COUNTS[entry & 15])
        unlisted = 64 * (len(found) * ENTRY[order - 1] + LEAST)
        return _List([entry >> 4 for entry in found], sums, 0, len(found), 0, unlisted)

    def _evaluate(self) -> int:
        self.inputs = [0] * INPUTS
        self._static_inputs()
        self._dynamic_inputs()
        self._blend_inputs()
        self._match_inputs()
        self.inputs[INPUTS - 2] = 256
        if self.network:
            low, middle, high, _, _ = self.tree[self.node]
            if everything := self.network[high] - self.network[low]:
                p = (self.network[high] - self.network[middle]) * 65536 // everything
                self.inputs[INPUTS - 1] = STRETCH[min(65535, max(1, p))]
        return self._mix()

    def _static_inputs(self) -> None:
        self.inputs[0] = self._stretched(self.node)
        self.best_static = self.best_level = 0
        self.static_at: list[int] = []
        for i, each in enumerate(self.lists):
            each.split = each.first
            self.static_at.append(-1)
            if each.last == each.first:
                continue
            middle = self.tree[self.node][1]
            each.split = bisect.bisect_left(each.ranks, middle, each.first, each.last)
            zeros = each.sums[each.split] - each.sums[each.first]
            ones = each.sums[each.last] - each.sums[each.split]
            row = (i * LEVELS + level(zeros)) * LEVELS + level(ones)
            self.static_at[i] = self.statics + row
            self.inputs[1 + i] = self._stretched(self.static_at[i])
            self.best_static, self.best_level = i + 1, min(3, level(zeros + ones) // 3)

    def _dynamic_inputs(self) -> None:
        self.slots, self.seen, self.best_dynamic = [], [], 0
        for i, key in enumerate(self.hashes):
            self.slots.append(self._slot(mixed_hash(key, self.node + 1)))
            self.seen.append(self.counts[self.slots[i]])
            if self.seen[i]:
                at = self.dynamics + i * 256 + self.seen[i]
                self.inputs[1 + STATIC + i] = self._stretched(at)
                self.best_dynamic = i + 1 if i < 3 else self.best_dynamic

    def _blend_inputs(self) -> None:
        """Compute `chances`, the interpolated probability of 1 by order; the last one is an input,
        and so is the same with the counts of the session.

        An unlisted token weighs `unlisted` times its probability in the shorter context, so all
        those under this node weigh `unlisted` times `reached`, the probability of the node."""
        self.chances = [_within(self.values[self.node] >> 16, 16)]
        for each, reached in zip(self.lists, self.reached, strict=False):
            zeros, ones = (
                (each.sums[to] - each.sums[at] << 12) - (to - at) * DISCOUNT * 64
                for at, to in ((each.first, each.split), (each.split, each.last))
            )
            rest = (each.unlisted * reached >> 28) + 1
            chance = ((ones << 16) + rest * self.chances[-1]) // (zeros + ones + rest)
            self.chances.append(_within(chance, 8))
        chance = self.chances[-1]
        at = 1 + STATIC + DYNAMIC + MATCHES
        self.inputs[at] = STRETCH[chance]
        for weight, seen in zip(SESSION, self.seen, strict=False):
            if seen:
                zeros, ones = seen >> 4, seen & 15
                rest = (weight * 256 * self.reached[STATIC] >> 28) + 1
                chance = ((ones << 28) + rest * chance) // ((zeros + ones << 12) + rest)
        self.inputs[at + 1] = STRETCH[_within(chance, 8)]
        self.surprise = min(15, 29 - self.reached[STATIC].bit_length())

    def _slot(self, key: int) -> int:
        check = key >> 56 | 1
        here = key >> 20 & (len(self.counts) - 1)
        other = here ^ 1
        for slot in (here, other):
            if self.checks[slot] == check:
                return slot
        sizes = [(self.counts[slot] >> 4) + (self.counts[slot] & 15) for slot in (here, other)]
        slot = other if sizes[1] < sizes[0] else here
        self.checks[slot], self.counts[slot] = check, 0
        return slot

    def _match_inputs(self) -> None:
        low, middle, high, _, _ = self.tree[self.node]
        self.match_class, self.match_bit, self.match_at = 0, 0, [-1] * MATCHES
        for i, rank in enumerate(self.predicted):
            if not low <= rank < high:
                continue
            length = self.lanes[self.lane].matches[i].length
            row = min(length, MATCH_MAX - 1) * 2 + int(rank >= middle)
            self.match_at[i] = self.matches + i * 2 * MATCH_MAX + row
            self.inputs[1 + STATIC + DYNAMIC + i] = self._stretched(self.match_at[i])
            if i == 0:
                self.match_class = 1 if length < 4 else 2 if length < 16 else 3
                self.match_bit = 1 + int(rank >= middle)

    def _mix(self) -> int:
        seen = self.seen[self.best_dynamic - 1] if self.best_dynamic else 0
        certain = min(3, (seen >> 4) + (seen & 15) - 1) if self.best_dynamic else 0
        reach = 2 if self.best_static > 4 else 1 if self.best_static > 2 else 0
        surprise = self.surprise * 64
        rows = (
            self.best_static * 16 + self.best_level * 4 + self.match_class,
            self.node,
            self.best_dynamic * 16 + certain * 4 + reach,
            self.lanes[self.lane].history[-1],
            surprise + self.match_bit * 4 + self.best_dynamic,
            surprise + self.best_static * 8 + self.best_dynamic,
        )
        self.sets = [at + row * INPUTS for at, row in zip(self.mixers, rows, strict=True)]
        self.mixed = [self._dot(at, self.inputs) for at in self.sets]
        self.final_set = self.last + (self.surprise * 8 + self.best_static) * SETS
        self.probability = SQUASH[2048 + self._dot(self.final_set, self.mixed)]
        return self.probability

    def _dot(self, at: int, inputs: list[int]) -> int:
        total = sum(_signed(self.values[at + i]) * x for i, x in enumerate(inputs))
        return max(-STRETCH_MAX, min(STRETCH_MAX, total >> 16))

    def _adjust(self, at: int, inputs: list[int], p: int, bit: int, rate: int) -> None:
        error = ((bit << 16) - p) * rate
        for i, x in enumerate(inputs):
            step = (x * error + (1 << 17)) >> 18
            self.values[at + i] = (self.values[at + i] + step) & 0xFFFFFFFF

    def _stretched(self, at: int) -> int:
        return STRETCH[self.values[at] >> 16]

    def _update(self, at: int, bit: int) -> None:
        n, p = self.values[at] & 1023, self.values[at] >> 10
        p += (((1 << 22) - 1 if bit else 0) - p) * RATES[n] >> 16
        p = max(64, min((1 << 22) - 64, p))
        self.values[at] = p << 10 | min(1023, n + 1)

    def _learn(self, bit: int) -> None:
        for at, mixed in zip(self.sets, self.mixed, strict=True):
            self._adjust(at, self.inputs, SQUASH[2048 + mixed], bit, RATE)
        self._adjust(self.final_set, self.mixed, self.probability, bit, FINAL_RATE)
        taken = [chance if bit else 65536 - chance for chance in self.chances]
        self.reached = [max(1, r * p >> 16) for r, p in zip(self.reached, taken, strict=True)]
        self._update(self.node, bit)
        for at, each in zip(self.static_at, self.lists, strict=True):
            if at >= 0:
                self._update(at, bit)
            if bit:
                each.first = each.split
            else:
                each.last = each.split
        for i, (slot, seen) in enumerate(zip(self.slots, self.seen, strict=True)):
            if seen:
                self._update(self.dynamics + i * 256 + seen, bit)
            same, other = (seen & 15, seen >> 4) if bit else (seen >> 4, seen & 15)
            same, other = min(15, same + 1), (other + 2) // 2 if other > 2 else other
            self.counts[slot] = other << 4 | same if bit else same << 4 | other
        for i, at in enumerate(self.match_at):
            if at >= 0:
                self._update(at, bit)
                if (at - self.matches) & 1 != bit:
                    self.predicted[i] = -1


def _listed(bucket: list[int], check: int) -> list[int]:
    """The list in a bucket whose head has this check value."""
    at = 0
    while at < len(bucket):
        head, n = bucket[at], bucket[at] & 63
        at += 1
        if n == 63:
            n, at = bucket[at], at + 1
        if head >> 6 == check:
            return bucket[at : at + n]
        at += n
    return []


def _within(chance: int, least: int) -> int:
    """A probability out of 65536, kept `least` away from 0 and 1."""
    return min(65535 - least, max(least, chance))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
