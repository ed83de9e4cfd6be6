"""Making samplers that take long, such as those of a grammar, before their jobs are queued.

The inference thread makes a sampler when it begins a job, and all other jobs wait meanwhile. A
grammar may take a second to read, so that is done on other threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from towerd.engine.base import SamplingParams
from towerd.engine.embedded.job import Job
from towerd.engine.embedded.sampler import Sampler
from towerd.engine.embedded.vocab import Vocab
from towerd.errors import TowerdError, Unavailable

log = logging.getLogger(__name__)

BIASES_QUICK_MAX = 1000
_THREADS = 2
_INTERNAL = "Internal error while the request was prepared; the daemon's log has it."


class Preparer:
    """Makes samplers. Used on the event loop; `submit` and `failed` are called on its threads."""

    def __init__(
        self,
        vocab: Vocab,
        n_ctx: int,
        queue_max: int,
        submit: Callable[[Job], None],
        failed: Callable[[Job, TowerdError], None],
    ) -> None:
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._queue_max = queue_max
        self._submit = submit
        self._failed = failed
        self._n = 0
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "towerd-prepare")

    def add(self, job: Job) -> None:
        """Make the sampler of `job`, then queue it. Raises Unavailable when too many wait."""
        with self._counting:
            if self._n >= self._queue_max:
                raise Unavailable(
                    f"{self._queue_max} requests are being prepared already; try again later."
                )
            self._n += 1
        self._threads.submit(self._prepare, job)

    def close(self) -> None:
        """Wait until all that was added is queued or failed."""
        self._threads.shutdown()

    def _prepare(self, job: Job) -> None:
        try:
            if not job.cancelled:
                job.sampler = Sampler(job.request.sampling, self._vocab, self._n_ctx)
            self._submit(job)
        except TowerdError as error:
            self._failed(job, error)
        except Exception:
            log.exception("a request could not be prepared")
            self._failed(job, TowerdError(_INTERNAL))
        finally:
            with self._counting:
                self._n -= 1


def takes_long(sampling: SamplingParams) -> bool:
    """Whether making the sampler may keep the inference thread for more than a moment."""
    return bool(sampling.grammar) or len(sampling.logit_bias) > BIASES_QUICK_MAX
