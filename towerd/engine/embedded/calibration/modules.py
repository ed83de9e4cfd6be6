"""EmbeddedModules: measures texts to be spliced in, in steps between those of requests."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from towerd.drift import Drift
from towerd.engine.embedded.calibration.calibrate import calibration_text
from towerd.engine.embedded.calibration.scratch import Scratch, SteppedSequence, other_shapes
from towerd.engine.embedded.calibration.splice_meter import (
    SpliceMeter,
    choose,
    make_cases,
)
from towerd.engine.embedded.context.core import Core
from towerd.engine.embedded.restore.splice import Splicer
from towerd.engine.embedded.run.scheduler import Scheduler
from towerd.errors import Unavailable
from towerd.store.tree.module import Module, Spans
from towerd.tiers.formats.calibration import DriftSample, allows
from towerd.tiers.module_text import PERCENTS_MORE, check_length
from towerd.tokens import Ids, ids_bytes

T = TypeVar("T")

_STEP_S = 0.25
"""How long a step may take: running streams wait for it."""
_WAIT_S = 0.1
"""How long to wait before asking again whether there is room for a step."""


class EmbeddedModules:
    """See `towerd.engine.base.ModuleMaker`. `close` it before the scheduler."""

    def __init__(self, core: Core, scheduler: Scheduler, splicer: Splicer) -> None:
        self._core = core
        self._scheduler = scheduler
        self._splicer = splicer
        self._stop = threading.Event()
        self._one = threading.Lock()
        """Held by the running measurement; others wait."""

    def close(self) -> None:
        """End a running measurement at its next step."""
        self._stop.set()
        with self._one:
            pass

    def check(self, n: int) -> None:
        self._splicer.check()
        check_length(n)
        make_cases(np.zeros(1, np.int32), self._head(), n, self._core.n_ctx)

    def path(self, ids: Ids) -> Ids:
        return np.concatenate([self._head(), ids])

    async def measure(self, ids: Ids, percent: float) -> Module:
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._measure, ids, percent, given_up)
        finally:
            given_up.set()

    def _head(self) -> Ids:
        """The tokens that every prompt begins with: BOS, or none."""
        vocab = self._core.vocab
        return np.array([vocab.bos_id] if vocab.add_bos else [], np.int32)

    def _measure(self, ids: Ids, percent: float, given_up: threading.Event) -> Module:
        with self._one:
            core, head = self._core, self._head()
            text = core.vocab.tokenize(calibration_text(), False, False)
            scratch = Scratch(core.context, core.context.n_seqs - 1)

            def step(work: Callable[[], T], n_cells: int) -> T:
                return self._step(work, n_cells, given_up)

            def line() -> SteppedSequence:
                return SteppedSequence(scratch, run_step=step, step_s=_STEP_S)

            rot_k = core.info.row_identity.rot_k
            rope, shapes = self._splicer.check(), other_shapes(core.context)
            meter = SpliceMeter(line, rope, rot_k=rot_k, head=head, ids=ids, shapes=shapes)
            meter.prepare(make_cases(text, head, len(ids), core.n_ctx))
            spans, cost = within(meter, percent, self._splicer.fidelity)
        digest = hashlib.blake2b(ids_bytes(ids), digest_size=32).hexdigest()
        fidelity = self._splicer.fidelity
        costs = cost.kl, cost.top1, meter.floor.kl
        of = core.info.row_identity.digest().hex()
        return Module(len(head), digest, percent, spans, *costs, fidelity, of)

    def _step(self, work: Callable[[], T], n_cells: int, given_up: threading.Event) -> T:
        """Run `work` on the inference thread once `n_cells` cells are free. Raises Unavailable
        when the daemon closes or the caller no longer waits for the result."""
        while not (self._stop.is_set() or given_up.is_set()):
            answer = self._scheduler.call_with_room(work, n_cells).result()
            if answer:
                return answer[0]
            self._stop.wait(_WAIT_S)
        raise Unavailable("The measurement of a module was ended; precache it again.")


def within(meter: SpliceMeter, percent: float, fidelity: str) -> tuple[Spans, DriftSample]:
    """The tokens to evaluate again, and what splicing the others in costs: `percent` of all, or
    the first larger share whose drift `fidelity` allows; the last one tried if there is none.

    The drift is the mean over some 200 tokens, less the floor on the same ones."""
    shares = [percent, *(more for more in PERCENTS_MORE if more > percent)]
    while True:
        spans = choose(meter.deviation, shares.pop(0))
        cost = meter.cost(spans)
        if not shares or allows(fidelity, Drift(cost.kl, meter.floor.kl)):
            return spans, cost
