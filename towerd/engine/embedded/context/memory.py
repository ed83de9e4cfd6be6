"""SequenceMemory: what the live tier asks of a context's memory, by the kind of the model.

- Dense attention: the rows of each position can be read and restored by themselves.
- Sliding-window attention beside full attention: rows that llama.cpp would overwrite are kept.
- Recurrent, hybrid and whole memories have a state that is valid at one position only. It cannot be
  cut or shortened, but it can be copied out, restored, and shared by sequences that continue from
  the same position (llama.cpp's `src/llama-memory-{recurrent,hybrid}.cpp`).

The kind follows from what llama.cpp says of a model, and is checked on a few tokens' state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from towerd.engine.embedded.context.context import PARTIAL, LlamaContext
from towerd.engine.embedded.context.head_memory import HeadMemory
from towerd.engine.embedded.context.places import Places
from towerd.engine.embedded.context.sequences import Buffer
from towerd.model.llama_model import LlamaModel
from towerd.model.row_memory import RowMemory
from towerd.settings.config import Config
from towerd.slots.blob import emit_blob, parse_full_rows, parse_rows
from towerd.slots.errors import StateError
from towerd.slots.kind import DENSE, HYBRID, RECURRENT, WHOLE, WINDOW, StateKind
from towerd.slots.labels import Labels, head_of_tokens, label_tokens
from towerd.slots.layout import KVLayout
from towerd.slots.rope import Rope
from towerd.slots.rows import HeadRows, KVRows, join
from towerd.slots.shift import shift
from towerd.slots.state import PREFIX_BYTES
from towerd.tokens import Ids

log = logging.getLogger(__name__)

SEQS_MAX = 256  # LLAMA_MAX_SEQ
_STATE_SHARE = 16
"""The live sequences' recurrent states take at most 1 / _STATE_SHARE of the memory that holds them."""
_NO_ROWS = KVLayout((), ())
_STATE_PLACE = slice(PREFIX_BYTES + 4, PREFIX_BYTES + 8)
"""Where a recurrent state has the place at which it is valid: behind the number of its cells, which is 1."""


class SequenceMemory:
    """The memory of dense attention. Sequences [0, n_live) are the pool's; `scratch` is the one beside
    them that rows pass through. Called by the inference thread only."""

    def __init__(
        self, context: LlamaContext, layout: KVLayout, kind: StateKind = DENSE, tail: bytes = b""
    ) -> None:
        """layout: of the rows; without layers if the kind has no rows; tail: the bytes that a blob of
        rows must end with"""
        self.context = context
        self.layout = layout
        self.kind = kind
        self.tail = tail
        self.head: HeadMemory | None = None
        """The rows of a head that drafts, which come and go with the model's; None: it keeps none."""
        self.n_live = self.scratch = context.n_seqs - 1

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Take positions [p0, p1) out of a sequence. Raises TowerdError where only all can."""
        self.context.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share the cells [p0, p1) of `src` with `dst`; a recurrent state comes along whole."""
        self.context.seq_cp(src, dst, p0, p1)

    def can_branch(self, seq: int, n: int) -> bool:
        """Whether all of the first `n` positions of a sequence are there to continue from."""
        return True

    def protect(self, seq: int, n: int, n_more: int) -> None:
        """Make sure that the rows in the first `n` places of `seq` outlive `n_more` decodes."""

    def rows(self, seq: int, p0: int, p1: int, places: Places | None = None) -> KVRows | None:
        """The rows [p0, p1) with what a head has of them, copied out; None if some of them are gone.
        Needs `has_rows`.

        places: those of the sequence's tokens; None: each is at its index"""
        first, end = (p0, p1) if places is None else places.whole(p0, p1)
        labels = None if places is None else places.between(first, end)
        if labels is None:
            return self._rows_at(seq, first, end, first, None).slice(p0, p1)
        at = int(labels[0]), int(labels[-1]) + 1
        return self._rows_at(seq, *at, first, labels).slice(p0, p1)

    def _rows_at(self, seq: int, place: int, end: int, p0: int, labels: Labels | None) -> KVRows:
        """The rows in the context's places [place, end). labels: int32[n], the places of the tokens from
        `p0` on that they are; None: each is at its index"""
        self.context.seq_cp(seq, self.scratch, place, end)
        try:
            blob = self._rows_blob(self.scratch)
            head = None if self.head is None else self.head.rows(self.scratch)
        finally:
            self.context.seq_rm(self.scratch)
        if labels is not None:
            label_tokens(blob, p0, labels)
            head = None if head is None else head_of_tokens(head, p0, labels)
        has_window = self.kind is WINDOW
        cell_ext = self.layout.cell_ext
        rows = parse_rows(blob, cell_ext=cell_ext, has_window=has_window, layout=self.layout)
        return rows if head is None else replace(rows, head=head.slice(rows.p0, rows.p1))

    def _rows_blob(self, seq: int) -> Buffer:
        """A sequence's blob up to the end of its rows."""
        return self.context.get_state(seq)

    # ---- the layers that attend to everything, which may lose single places -----------------

    @property
    def full_layout(self) -> KVLayout:
        """The layout of the rows of the layers that attend to everything."""
        return self.layout.sections[0]

    def full_rows(self, seq: int, p0: int, p1: int) -> KVRows:
        """The rows of these layers in those of the places [p0, p1) that the sequence has, copied out."""
        rows = self.rows(seq, p0, p1)
        assert rows is not None
        return rows

    def thin(self, seq: int, spans: Sequence[tuple[int, int]]) -> None:
        """Take the places [p0, p1) of each span out of these layers. The last place stays."""
        for p0, p1 in spans:
            self.seq_rm(seq, p0, p1)

    def beside(self, seq: int) -> Buffer:
        """What the sequence has beside their rows: those that its windows see, or its state."""
        return np.empty(0, np.uint8)

    def n_beside(self, seq: int) -> int:
        """How many of the sequence's last places have rows beside theirs."""
        return 0

    def moved_beside(self, seq: int, by: int, rope: Rope, *, rot_k: bool) -> Buffer:
        """What the sequence would have beside their rows `by` places further. rope: of all layers with
        rows; rot_k: see `shift`"""
        return self.beside(seq)

    def replace(self, seq: int, rows: KVRows, beside: Buffer) -> None:
        """Make these the rows of these layers, and have `beside` them what the sequence had. Its cells
        are free already. Raises TowerdError; the sequence is then empty."""
        tail = beside[PREFIX_BYTES:].tobytes()
        blob = np.asarray(emit_blob([rows], v_trans=self.context.v_trans, tail=tail))
        self.append(seq, blob, is_empty=True)

    def n_back(self, seq: int) -> int:
        """By how many of its last places the sequence can be cut."""
        return self.context.pos_max(seq) + 1

    def park(self, seq: int) -> Buffer:
        """A blob of the sequence as it is."""
        return self.context.get_state(seq)

    # ---- what comes and goes with a sequence -------------------------------------------------

    def append(
        self, seq: int, blob: Buffer, *, is_empty: bool, head: HeadRows | None = None
    ) -> None:
        """Put the rows of a blob behind what `seq` holds. head: what a head had of them. Raises
        TowerdError."""
        into = seq if is_empty else self.scratch
        self.context.set_state(into, blob)
        if self.head is not None and head is not None:
            self.head.put(into, head)
        if not is_empty:
            self.seq_cp(self.scratch, seq)
            self.context.seq_rm(self.scratch)

    def snapshot(self, seq: int) -> Buffer:
        """The state that is valid exactly where the sequence ends. Needs `has_state`."""
        raise AssertionError("a memory of rows has no state")

    def restore(self, seq: int, state: Buffer) -> None:
        """Make a snapshot the sequence's state; its rows, if the kind has any, must end where the state
        does. Raises TowerdError."""
        raise AssertionError("a memory of rows has no state")


class WindowMemory(SequenceMemory):
    """The window's layers have a cache of their own, here as large as the other one (`swa_full`). Two
    properties of llama.cpp would keep its rows from being cut at any token:

    - A sequence's state leaves out window rows that the last position does not see. Read in pieces
      no longer than the window, each piece's last position sees all of it.
    - A new token may take the cell of a row that slid out of its window, unless two sequences hold
      the cell (`llama_kv_cache::find_slot`). So every live sequence has a twin that holds on to what
      is about to slide out: of the context's 2 n + 1 sequences the last n.

    If a row is lost nevertheless, `pos_min` shows it: llama.cpp then forgets everything before it."""

    def __init__(self, context: LlamaContext, layout: KVLayout, window: int) -> None:
        """window: positions that the layers see, at least 1"""
        super().__init__(context, layout, WINDOW)
        self.n_live = self.scratch = (context.n_seqs - 1) // 2
        self._window = window
        self._held = [0] * self.n_live
        """How many leading positions of each sequence its twin holds too."""

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        super().seq_rm(seq, p0, p1)
        super().seq_rm(self._twin(seq), p0, p1)
        self._held[seq] = min(self._held[seq], max(p0, 0))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        super().seq_cp(src, dst, p0, p1)
        self._hold_all(dst)

    def can_branch(self, seq: int, n: int) -> bool:
        return self.context.pos_min(seq) <= max(0, n - self._window)

    def protect(self, seq: int, n: int, n_more: int) -> None:
        if n - self._held[seq] + n_more >= self._window:
            self._hold_all(seq)

    def rows(self, seq: int, p0: int, p1: int, places: Places | None = None) -> KVRows | None:
        # Each token is at its index: pictures that share positions are refused with windows.
        if self.context.pos_min(seq) > p0:
            return None
        read = super().rows
        pieces = (read(seq, start, end) for start, end in self._pieces(p0, p1))
        return join([piece for piece in pieces if piece is not None])

    def full_rows(self, seq: int, p0: int, p1: int) -> KVRows:
        self.context.seq_cp(seq, self.scratch, p0, p1)
        try:
            return parse_full_rows(self.context.get_state(self.scratch), self.layout)
        finally:
            self.context.seq_rm(self.scratch)

    def thin(self, seq: int, spans: Sequence[tuple[int, int]]) -> None:
        # llama.cpp takes a place out of both caches, so the window's rows are put back.
        beside = self.beside(seq)
        super().seq_rm(self._twin(seq))
        for p0, p1 in spans:
            super().seq_rm(seq, p0, p1)
        self.context.set_state(seq, beside, PARTIAL)
        self._held[seq] = 0
        self._hold_all(seq)

    def beside(self, seq: int) -> Buffer:
        return self.context.get_state(seq, PARTIAL)

    def n_beside(self, seq: int) -> int:
        return self.context.pos_max(seq) + 1 - self.context.pos_min(seq)

    def moved_beside(self, seq: int, by: int, rope: Rope, *, rot_k: bool) -> Buffer:
        rows = self._window_rows(self.beside(seq))
        rows = rows.slice(max(rows.p0, -by), rows.p1)
        moved = shift(rows, rows.p0 + by, rope.sections[1], rot_k=rot_k)
        return np.asarray(emit_blob([moved], v_trans=self.context.v_trans))

    def n_back(self, seq: int) -> int:
        first, n_all = self.context.pos_min(seq), self.context.pos_max(seq) + 1
        return n_all if first == 0 else n_all - first - self._window + 1

    def park(self, seq: int) -> Buffer:
        # All rows that the windows of earlier tokens see come along.
        p0, p1 = self.context.pos_min(seq), self.context.pos_max(seq) + 1
        pieces = []
        for start, end in self._pieces(p0, p1):
            self.context.seq_cp(seq, self.scratch, start, end)
            try:
                pieces.append(self._window_rows(self.beside(self.scratch)))
            finally:
                self.context.seq_rm(self.scratch)
        v_trans = self.context.v_trans
        tail = np.asarray(emit_blob([join(pieces)], v_trans=v_trans))[PREFIX_BYTES:].tobytes()
        return np.asarray(emit_blob([self.full_rows(seq, 0, p1)], v_trans=v_trans, tail=tail))

    def _window_rows(self, beside: Buffer) -> KVRows:
        layout = self.layout.sections[1]
        return parse_rows(beside, cell_ext=layout.cell_ext, layout=layout)

    def _pieces(self, p0: int, p1: int) -> Iterable[tuple[int, int]]:
        """[p0, p1) in pieces no longer than the window."""
        ends = range((p0 // self._window + 1) * self._window, p1, self._window)
        return pairwise([p0, *ends, p1])

    def append(
        self, seq: int, blob: Buffer, *, is_empty: bool, head: HeadRows | None = None
    ) -> None:
        super().append(seq, blob, is_empty=is_empty, head=head)
        if is_empty:
            self._hold_all(seq)

    def _twin(self, seq: int) -> int:
        return self.n_live + 1 + seq

    def _hold_all(self, seq: int) -> None:
        self.context.seq_cp(seq, self._twin(seq), self._held[seq], -1)
        self._held[seq] = self.context.pos_max(seq) + 1


class StatefulMemory(SequenceMemory):
    """A hybrid's rows and state are stored apart; recurrent and whole memories have only a state."""

    @property
    def _flags(self) -> int:
        return PARTIAL if self.kind is HYBRID else 0

    def _rows_blob(self, seq: int) -> Buffer:
        return _attention_part(self.context, seq)

    def beside(self, seq: int) -> Buffer:
        return self.snapshot(seq)

    def n_back(self, seq: int) -> int:
        return 0

    def moved_beside(self, seq: int, by: int, rope: Rope, *, rot_k: bool) -> Buffer:
        # A state depends on no position, but says where it is valid.
        moved = self.beside(seq)
        moved[_STATE_PLACE].view("<i4")[:] += by
        return moved

    def snapshot(self, seq: int) -> Buffer:
        state = self.context.get_state(seq, self._flags)
        state[4:PREFIX_BYTES] = 0  # the sequence id: equal states are equal bytes
        return state

    def restore(self, seq: int, state: Buffer) -> None:
        self.context.set_state(seq, state, self._flags)


class StreamMemory(StatefulMemory):
    """For whole states in which each sequence has a cache of its own.

    llama.cpp's `src/llama-kv-cache-dsv4.cpp` ends the process when asked to copy a part of a
    sequence, and copies a whole one only at the next decode, when the source may have changed or
    be gone. The bytes are therefore copied here, at once."""

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.context.set_state(dst, self.context.get_state(src))


def _attention_part(context: LlamaContext, seq: int) -> Buffer:
    """The blob of a hybrid's sequence without the recurrent state at its end."""
    n_state = context.state_size(seq, PARTIAL) - PREFIX_BYTES
    blob = context.get_state(seq)
    return blob[: len(blob) - n_state]


def _empty_tail(context: LlamaContext) -> bytes:
    """The recurrent part of a hybrid's blob that holds no state: what rows alone end with.
    The context's last sequence must be empty."""
    part = context.get_state(context.n_seqs - 1, PARTIAL)
    return np.ascontiguousarray(part[PREFIX_BYTES:]).tobytes()


def n_seqs_of(model: LlamaModel, config: Config, rows: RowMemory) -> int:
    """Sequences that the context needs: the live ones, one for scratch, and a window's twins.

    In a recurrent model each has its state in memory, used or not, so there are fewer of them
    if states are large. With compressed keys each has a cache for a whole context."""
    if model.is_compressed:
        return min(SEQS_MAX, config.parallel + 1)
    if model.is_recurrent or model.is_hybrid:
        affordable = rows.n_affordable(
            state_bytes(model, config), ram_share=_STATE_SHARE, gpu_share=_STATE_SHARE
        )
        n_live = min(config.live_sequences, max(config.parallel, affordable))
        return min(SEQS_MAX, n_live + 1)
    if model.n_swa > 0:
        return min(SEQS_MAX - 1, 2 * config.live_sequences + 1)
    return min(SEQS_MAX, config.live_sequences + 1)


def state_bytes(model: LlamaModel, config: Config) -> int:
    """Bytes of one sequence's recurrent state, read off a context for a single one."""
    context = LlamaContext(model, config, n_cells=256, n_seqs=1)
    try:
        _decode(context, np.array([0], np.int32))
        return context.state_size(0, PARTIAL)
    finally:
        context.close()


def open_memory(context: LlamaContext, model: LlamaModel) -> SequenceMemory:
    """The memory of a fresh context, which decodes a few tokens for it and is empty again.

    Raises StateError if llama.cpp writes dense attention's state otherwise than we read it;
    a state of any other unknown form is kept whole."""
    if model.is_recurrent:
        return StatefulMemory(context, _NO_ROWS, RECURRENT)
    ids, seq = np.array([0, 0], np.int32), context.n_seqs - 1
    tail = _empty_tail(context) if model.is_hybrid else b""
    _decode(context, ids, seq)
    try:
        blob = _attention_part(context, seq) if model.is_hybrid else context.get_state(seq)
        return _of_rows(context, model, blob, tail)
    except StateError as error:
        if not (model.is_hybrid or model.n_swa or model.has_indexer):
            raise
        log.warning("this model's state is stored whole", extra={"reason": str(error)})
        kept = StreamMemory if model.is_compressed else StatefulMemory
        return kept(context, _NO_ROWS, WHOLE)
    finally:
        context.seq_rm(seq)


def _of_rows(context: LlamaContext, model: LlamaModel, blob: Buffer, tail: bytes) -> SequenceMemory:
    """The memory whose rows are in `blob`. Raises StateError unless they emit the same bytes."""
    cell_ext, seq = model.has_cell_ext, context.n_seqs - 1
    try:
        rows, is_window = parse_rows(blob, cell_ext=cell_ext), False
    except StateError:
        if model.n_swa <= 0 or model.is_hybrid:
            raise
        rows, is_window = parse_rows(blob, cell_ext=cell_ext, has_window=True), True
    again = emit_blob([rows], v_trans=context.v_trans, seq_id=seq, tail=tail)
    if bytes(again)[: len(blob)] != blob.tobytes() or len(again) != len(blob) + len(tail):
        raise StateError("parsed and emitted again it is not the same bytes")
    if is_window:
        return WindowMemory(context, rows.layout, model.n_swa)
    if not model.is_hybrid:
        return SequenceMemory(context, rows.layout)
    return StatefulMemory(context, rows.layout, HYBRID, tail)


def _decode(context: LlamaContext, ids: Ids, seq: int = 0) -> None:
    context.batch.add(ids, 0, seq, logits_last=True)
    context.decode()
