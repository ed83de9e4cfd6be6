"""HeadState: how the context of a head that drafts writes the rows of a sequence.

It is a sequence blob of one cache or of two, full layers and those of a sliding window. Unlike a
model's, one of them may have no layer at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from towerd.slots.compose import StateFrame, state_size, write_state
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.reader import ByteReader, Data
from towerd.slots.rows import Blob, KVRows
from towerd.slots.state import BLOB_MAGIC, PREFIX_BYTES, SequenceState, parse_state, write_prefix

CACHES_MAX = 2


@dataclass(frozen=True, slots=True)
class HeadState:
    """caches: the layout of each cache, in llama.cpp's order; v_trans: whether they have V transposed."""

    caches: tuple[KVLayout, ...]
    v_trans: bool

    @property
    def layout(self) -> KVLayout:
        """Of the layers of all caches."""
        k = tuple(itertools.chain.from_iterable(cache.k for cache in self.caches))
        v = tuple(itertools.chain.from_iterable(cache.v for cache in self.caches))
        return KVLayout(k, v, self.caches[0].cell_ext)

    def parse(self, blob: Data) -> KVRows:
        """The rows of a blob, token-major, views of it where they can be. StateError for a blob that has
        other caches, or other positions in one of them than in the other."""
        reader = _behind_prefix(blob)
        states = []
        for cache, is_last in _with_last(self.caches):
            state = _parsed(reader, cache.cell_ext, bool(cache.v), is_last)
            if state.rows.layout != cache:
                raise StateError("a head's state has another layout than before")
            states.append(state)
        return _joined(self.layout, states)

    def emit(self, rows: KVRows, seq_id: int = 0) -> Blob:
        """A blob that the head's context takes: the inverse of `parse`. StateError for another layout."""
        if rows.layout != self.layout:
            raise StateError("these are the rows of another head")
        n, frame = len(rows), StateFrame(v_trans=self.v_trans, seq_id=seq_id)
        sizes = [state_size(cache, n, frame.n_stream) for cache in self.caches]
        blob = np.empty(PREFIX_BYTES + sum(sizes), np.uint8)
        write_prefix(blob, frame.seq_id)
        at, layer = PREFIX_BYTES, 0
        for cache, size in zip(self.caches, sizes, strict=True):
            part = rows.layers(layer, layer + cache.n_layer, cache, rows.ext)
            write_state(blob[at : at + size], (part,), frame)
            at, layer = at + size, layer + cache.n_layer
        return blob


def read_head_state(blob: Blob) -> HeadState:
    """How the context that wrote this blob writes one. Raises StateError unless the same bytes come of
    it again."""
    ways = itertools.product(range(1, CACHES_MAX + 1), (False, True), (True, False))
    for n_caches, cell_ext, has_v in ways:
        try:
            reader = _behind_prefix(blob)
            states = [_parsed(reader, cell_ext, has_v, i == n_caches - 1) for i in range(n_caches)]
            found = HeadState(tuple(state.rows.layout for state in states), states[0].frame.v_trans)
            again = found.emit(found.parse(blob), states[0].frame.seq_id)
            if found.layout.n_layer and np.array_equal(again, blob):
                return found
        except StateError:
            continue
    raise StateError("the state of this head has a form that is not known")


def _behind_prefix(blob: Data) -> ByteReader:
    reader = ByteReader(blob)
    if reader.u32("magic") != BLOB_MAGIC:
        raise StateError("not a sequence blob")
    reader.i32("sequence id")
    return reader


def _with_last(caches: tuple[KVLayout, ...]) -> Iterator[tuple[KVLayout, bool]]:
    return ((cache, i == len(caches) - 1) for i, cache in enumerate(caches))


def _parsed(reader: ByteReader, cell_ext: bool, has_v: bool, is_last: bool) -> SequenceState:
    return parse_state(reader, cell_ext=cell_ext, has_v=has_v, is_last=is_last, n_layer_min=0)


def _joined(layout: KVLayout, states: list[SequenceState]) -> KVRows:
    first = states[0].rows
    if any(not np.array_equal(state.rows.positions, first.positions) for state in states):
        raise StateError("the caches of a head hold different positions")
    k = tuple(itertools.chain.from_iterable(state.rows.k for state in states))
    v = tuple(itertools.chain.from_iterable(state.rows.v for state in states))
    return KVRows(layout, first.positions, k, v, first.ext)
