"""Pictures and sounds: encoded, then evaluated in the context.

llama.cpp's libmtmd encodes a medium on a separate thread, while other streams continue, and the
inference thread evaluates the result in one step. Live or stored rows are reused like those of
text, without encoding or evaluating.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from towerd.engine.base import GenerateRequest
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.restore.restorer import Restorer
from towerd.engine.embedded.run.speculation import Speculator
from towerd.errors import InvalidRequest, TowerdError
from towerd.media_ids import Span
from towerd.tokens import Ids
from towerd.wire import Encoded, Medium, Projector


@dataclass(frozen=True, slots=True)
class Ready:
    """The encoded medium that a job stands before, for load number `load` of the job."""

    load: int
    span: Span
    medium: Medium | None
    """None if it did not come with the request, and is not kept."""
    encoded: Encoded | TowerdError | None


class Media:
    """Evaluates media. Used by the inference thread only, except `check`."""

    def __init__(
        self,
        projector: Projector | None,
        context: LlamaContext,
        pool: LivePool,
        restorer: Restorer,
        speculator: Speculator,
    ) -> None:
        self.n_encoded = 0
        self.n_evaluated = 0
        self._projector = projector
        self._context = context
        self._pool = pool
        self._restorer = restorer
        self._speculator = speculator
        self._threads: list[threading.Thread] = []
        self._encoding = threading.Lock()

    def check(self, request: GenerateRequest, ids: Ids) -> None:
        """Raises InvalidRequest if the media among `ids` cannot be evaluated. May be called by
        any thread."""
        if not (ids < 0).any():
            return
        if self._projector is None:
            raise InvalidRequest("This model takes no media: start towerd with --mmproj.")
        if request.live.policy != "none":
            raise InvalidRequest(
                f"A chat with media cannot be kept with retention {request.live.policy!r}: send "
                '"retention": "none".'
            )
        for medium in request.media:
            self._check_size(medium, self._projector)

    def _check_size(self, medium: Medium, projector: Projector) -> None:
        n_max = self._context.n_ubatch
        if len(medium.ids) > n_max and projector.is_whole(medium):
            raise InvalidRequest(
                f"A medium of {len(medium.ids)} tokens has to be evaluated at once by this "
                f"model: start towerd with --ubatch-size {len(medium.ids)} (now {n_max})."
            )

    def encode(self, job: Job, on_ready: Callable[[Job, Ready], None]) -> None:
        """Encode the medium that `job` stands before; `on_ready` is called on another thread."""
        span = job.medium_at(job.n_live)
        assert span is not None
        job.loads += 1
        load, projector, kept = job.loads, self._projector, job.request.kept_media
        medium = _find(job, span)
        if projector is None or (medium is None and kept is None):
            on_ready(job, Ready(load, span, None, None))
            return

        def work() -> None:
            found = medium
            made: Encoded | TowerdError | None = None
            with self._encoding:
                if not job.awaits(load):
                    return  # its client left while it waited behind others
                try:
                    if found is None and kept is not None:
                        found = kept(job.ids[slice(*span)])
                    if found is not None:
                        self._check_size(found, projector)
                        made = projector.encode(found)
                except TowerdError as error:
                    made = error
            on_ready(job, Ready(load, span, found, made))

        # A thread that ends takes llama.cpp's worker threads with it: see
        # `core.on_short_lived_thread`.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, name="towerd-encode", daemon=True))
        self._threads[-1].start()

    def evaluate(self, job: Job, ready: Ready, make_room: Callable[[int], bool]) -> bool:
        """Append the rows of a medium; False if there is no room and the job has to begin again.

        Raises TowerdError if it cannot be encoded or evaluated, or did not come with the
        request."""
        if isinstance(ready.encoded, TowerdError):
            raise ready.encoded
        if ready.medium is None or ready.encoded is None or self._projector is None:
            raise InvalidRequest(
                "What was computed for a picture or sound of this conversation is gone, and the request does not "
                "bring it again: send it along."
            )
        self.n_encoded += 1
        start, end = ready.span
        if not make_room(end - start):
            return False
        seq = job.seq
        assert seq is not None
        job.in_batch, job.logits_index = job.ids[start:end], -1
        self._restorer.protect([job])
        with self._context.adapted(job.adapted):
            self._context.apply_adapters()
            self._projector.decode(
                self._context.address,
                ready.medium,
                ready.encoded,
                seq.place_next,
                seq.id,
                self._speculator.head,
            )
        self._pool.append(seq, job.ids[start:end])
        self._restorer.advanced(job)
        self.n_evaluated += 1
        return True

    def close(self) -> None:
        """Wait for running encodings."""
        for thread in self._threads:
            thread.join()

    def stats(self) -> dict[str, int]:
        """Counters. May be called by any thread."""
        return {"media_encoded": self.n_encoded, "media_evaluated": self.n_evaluated}


def _find(job: Job, span: Span) -> Medium | None:
    wanted = job.ids[slice(*span)]
    return next((m for m in job.request.media if np.array_equal(m.ids, wanted)), None)
