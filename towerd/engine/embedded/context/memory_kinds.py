"""Chooses the memory of a model by what llama.cpp says, and checks it on a few tokens' state."""

from __future__ import annotations

import logging

import numpy as np

from towerd.engine.embedded.context.context import PARTIAL, Buffer, LlamaContext
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.context.plain import PlainMemory
from towerd.engine.embedded.context.stateful import (
    StatefulMemory,
    StreamMemory,
    attention_part,
    empty_tail,
)
from towerd.engine.embedded.context.window import WindowMemory
from towerd.model.llama_model import LlamaModel
from towerd.settings.config import Config
from towerd.slots.blob import emit_blob, parse_rows
from towerd.slots.errors import StateError
from towerd.slots.kind import HYBRID, RECURRENT, WHOLE
from towerd.slots.layout import KVLayout
from towerd.tokens import Ids

log = logging.getLogger(__name__)

SEQS_MAX = 256  # LLAMA_MAX_SEQ
_STATE_RAM_SHARE = 16
"""The live sequences' recurrent states take at most 1 / _STATE_RAM_SHARE of RAM."""
_NO_ROWS = KVLayout((), ())


def n_seqs_of(model: LlamaModel, config: Config, ram_bytes: int) -> int:
    """Sequences that the context needs: the live ones, one for scratch, and a window's twins.

    In a recurrent model each has its state in memory, used or not, so there are fewer of them
    if states are large. With compressed keys each has a cache for a whole context."""
    if model.is_compressed:
        return min(SEQS_MAX, config.parallel + 1)
    if model.is_recurrent or model.is_hybrid:
        affordable = ram_bytes // _STATE_RAM_SHARE // max(1, state_bytes(model, config))
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
    tail = empty_tail(context) if model.is_hybrid else b""
    _decode(context, ids, seq)
    try:
        blob = attention_part(context, seq) if model.is_hybrid else context.get_state(seq)
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
        return PlainMemory(context, rows.layout)
    return StatefulMemory(context, rows.layout, HYBRID, tail)


def _decode(context: LlamaContext, ids: Ids, seq: int = 0) -> None:
    context.batch.add(ids, 0, seq, logits_last=True)
    context.decode()
