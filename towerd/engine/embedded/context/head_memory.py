"""HeadMemory: the rows that a head which drafts has in a context of its own, as they come and go with
those of the model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable

import numpy as np

from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.sequences import Sequences
from towerd.errors import TowerdError
from towerd.model.row_flags import has_rotation
from towerd.slots.errors import StateError
from towerd.slots.head_state import HeadState, read_head_state
from towerd.slots.rows import HeadRows

log = logging.getLogger(__name__)


class HeadMemory:
    """Drafts are all that is lost where rows are missing, so no failure here is an error of a request.
    Called by the inference thread only."""

    def __init__(self, sequences: Sequences, state: HeadState, digest: bytes, lag: int) -> None:
        """sequences: of the head's context; state: how they are written; digest, lag: see `HeadRows`"""
        self.digest = digest
        self._lag = lag
        self._sequences = sequences
        self._state = state
        self._has_failed = False

    def rows(self, seq: int) -> HeadRows | None:
        """The rows of all positions that the head has of a sequence, copied out; None if there are
        none."""
        if self._sequences.pos_max(seq) < 0:
            return None
        try:
            rows = self._state.parse(self._sequences.get_state(seq))
            return HeadRows(self.digest, rows, self._lag)
        except (StateError, TowerdError) as error:
            self._note(error)
            return None

    def put(self, seq: int, head: HeadRows) -> None:
        """Make these the rows of a sequence, unless they are of another head."""
        if head.digest != self.digest:
            return
        try:
            self._sequences.set_state(seq, self._state.emit(head.rows))
        except (StateError, TowerdError) as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        if not self._has_failed:
            log.warning("a chat's drafts begin anew", extra={"reason": str(error)})
        self._has_failed = True


def open_head_memory(
    context: LlamaContext,
    scratch: int,
    sequences: Sequences,
    follow: Callable[[], None],
    weights: str,
    lag: int,
) -> HeadMemory | None:
    """The memory of a head that has just been loaded, read off what it has of two tokens; None if it has
    a form that we do not know, so that nothing of it is stored.

    context: the model's; scratch: an empty sequence of it; sequences: of the head's context; follow: has
    the head read what `context` evaluated last; weights: a hash of those that the head's rows depend on;
    lag: see `HeadRows`"""
    context.batch.add(np.zeros(2, np.int32), 0, scratch, logits_last=True)
    context.decode()
    try:
        follow()
        state = read_head_state(sequences.get_state(scratch))
    except (StateError, TowerdError) as error:
        log.warning(
            "what drafts are made of is not stored; a chat that comes from the store drafts from its "
            "next token on",
            extra={"reason": str(error)},
        )
        return None
    finally:
        context.seq_rm(scratch)
    return HeadMemory(sequences, state, _digest(state, weights), lag)


def _digest(state: HeadState, weights: str) -> bytes:
    """32 bytes that name all that the bytes of a head's rows depend on, besides what the model's do."""
    is_quantized = any(plane.format.is_quantized for plane in state.layout.planes)
    known = {
        "weights": weights,
        "layout": state.layout.to_json(),
        "rotated": is_quantized and has_rotation(os.environ),
    }
    return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=32).digest()
