"""Modules with given numbers, and what a splice in a fresh context gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from oracle import Answer, Oracle, ask, settle, some_ids
from services import EmbeddedService

from towerd.engine.embedded.calibration.measure import log_softmax
from towerd.engine.embedded.calibration.scratch import Scratch, SteppedSequence
from towerd.engine.embedded.calibration.splice_meter import SpliceMeter
from towerd.engine.embedded.restore.splice import rope_of
from towerd.store import Base, Module
from towerd.store.tree.module import Spans
from towerd.tokens import Ids

SPANS: Spans = ((0, 16), (48, 56))
NOISE = 0.01
"""What log-probabilities of the same evaluation in other batches and cells may differ by."""
KL = 0.001
"""What modules are said to cost: within the bound of every fidelity."""
N_MODULE = 100
N_KEPT = N_MODULE - 24


MODULE, OTHER = some_ids(N_MODULE, 1), some_ids(60, 2)
GAP, REST = some_ids(40, 3), some_ids(7, 4)
PROMPT = np.concatenate([GAP, MODULE, REST])


async def add_module(
    service: EmbeddedService,
    name: str = "m",
    ids: Ids = MODULE,
    spans: Spans = SPANS,
    scope: str = "local",
    public: bool = False,
    kl: float = KL,
    floor_kl: float = 0.0,
) -> Base:
    """Precache `ids` as a module, with given numbers instead of measured ones."""
    maker = service.engine.modules
    assert maker is not None
    maker.check(len(ids))
    path = maker.path(ids)
    await ask(service, path, 0, scope="public" if public else scope, precache=name)
    of = service.store.state.digest.hex()
    module = Module(len(path) - len(ids), "", 15.0, spans, kl, 0.9, floor_kl, row_identity=of)
    base = service.store.bases.add(name, path, scope, 0, public, None, module)
    await settle(service)
    return base


def spliced_logprobs(
    oracle: Oracle, parts: Sequence[Ids | tuple[Ids, Spans]], tail: Ids
) -> np.ndarray:
    """log-softmax after each of `tail`, in a fresh context: parts are evaluated, or spliced in
    with some of their tokens evaluated again."""
    model, context = oracle.model, oracle.context
    oracle.clear()
    scratch = Scratch(context, 1)
    rope = rope_of(model, {"type": _rope_type(oracle)}, context.n_cells)
    head = np.array([1], np.int32) if bos(oracle) else np.zeros(0, np.int32)
    line = SteppedSequence(scratch)
    for part in parts:
        if isinstance(part, tuple):
            meter = SpliceMeter(
                lambda: SteppedSequence(scratch), rope, rot_k=False, head=head, ids=part[0]
            )
            meter.prepare([])
            meter.splice(line, part[1])
        else:
            line.decode(part)
    return log_softmax(line.logits(tail))


def _rope_type(oracle: Oracle) -> str:
    import llama_cpp.llama_cpp as lib

    return str(lib.llama_model_rope_type(oracle.model.ptr))


def bos(oracle: Oracle) -> bool:
    import llama_cpp.llama_cpp as lib

    vocab = oracle.model.vocab_ptr
    return bool(lib.llama_vocab_get_add_bos(vocab)) and lib.llama_vocab_bos(vocab) == 1


def check_spliced(
    oracle: Oracle, parts: Sequence[Ids | tuple[Ids, Spans]], last: Ids, answer: Answer
) -> None:
    """The reply is what the same splice in a fresh context gives; `last`: the end of the prompt,
    after `parts`."""
    tail = np.concatenate([last, np.array(answer.ids[:-1], np.int32)])
    expected = spliced_logprobs(oracle, parts, tail)[len(last) - 1 :]
    assert difference(expected, answer) <= NOISE


def check_prefill(oracle: Oracle, prompt: Ids, answer: Answer) -> None:
    """The reply is what monolithic prefill gives."""
    assert difference(prefilled(oracle, prompt, answer), answer) <= NOISE


def prefilled(oracle: Oracle, prompt: Ids, answer: Answer) -> np.ndarray:
    whole = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    return oracle.logprobs(whole, len(prompt) - 1)


def difference(expected: np.ndarray, answer: Answer) -> float:
    """The largest one of the log-probabilities of the reply's tokens."""
    return max(
        abs(float(each.logprob - row[each.id]))
        for row, each in zip(expected, answer.probs, strict=True)
    )
