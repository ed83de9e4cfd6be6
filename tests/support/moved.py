"""Services that keep rows behind changed text, and what the same gives in a fresh context."""

from __future__ import annotations

import numpy as np
from oracle import Answer, Oracle
from services import EmbeddedService

from towerd.engine.embedded.calibration.measure import log_softmax
from towerd.engine.embedded.calibration.scratch import Scratch, SteppedSequence
from towerd.engine.embedded.context.memory import open_memory
from towerd.engine.moving.rotation import rope_of
from towerd.slots.kind import WINDOW
from towerd.slots.shift import shift
from towerd.tiers.moved_limits import BLOCK_TOKENS, MovedLimits, block_offsets
from towerd.tokens import Ids

ANYTHING = MovedLimits("", 0.0, 0.0, 0.0)
NOTHING = MovedLimits("", 0.0, 0.0, 1e9)


def allow(service: EmbeddedService, limits: MovedLimits = ANYTHING) -> None:
    """Set what deviations have to stay under."""
    service.tiers.moved_limits = limits


def moved_logprobs(
    oracle: Oracle, before: Ids, after: Ids, source: int, at: int, n: int, answer: Answer
) -> np.ndarray:
    """log-softmax for each token of the reply to `after`, in a fresh context: tokens [at, at + n) have
    the rows of [source, source + n) of `before`, but for the blocks, which are evaluated."""
    import llama_cpp.llama_cpp as lib

    oracle.clear()
    memory = open_memory(oracle.context, oracle.model)
    window = oracle.model.n_swa if memory.kind is WINDOW else 0
    scratch = Scratch(oracle.context, 1, cell_ext=memory.layout.cell_ext, window=window)
    line = SteppedSequence(scratch)
    line.decode(before)
    in_force = {"type": str(lib.llama_model_rope_type(oracle.model.ptr))}
    rope = rope_of(oracle.model, in_force, oracle.context.n_cells)
    moved = shift(line.rows(source, source + n), at, rope)
    line = SteppedSequence(scratch)
    line.decode(after[:at])
    offsets = block_offsets(n)
    for block, end in zip(offsets, [*offsets[1:], n], strict=True):
        stop = at + block + BLOCK_TOKENS
        line.decode(after[at + block : stop])
        line.append(moved.slice(stop, at + end))
    tail = np.concatenate([after[line.n :], np.array(answer.ids[:-1], np.int32)])
    return log_softmax(line.logits(tail))[len(after) - line.n - 1 :]


def difference(expected: np.ndarray, answer: Answer) -> float:
    """The largest one of the log-probabilities of the reply's tokens."""
    return max(
        abs(float(each.logprob - row[each.id]))
        for row, each in zip(expected, answer.probs, strict=True)
    )
