"""Hook: what a kind of chat keeps live, asked by the scheduler and the restorer at named moments.

The base class serves most requests: everything stays live, and a chat ends with its context.
Subclasses override the moments at which they differ. Called by the inference thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.live_set import EVERYTHING
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.restore.branching import Branching, Evict, FoundLive
from towerd.tiers.plan import RestorePlan


class Hook:
    """The hook of chats of which everything stays live."""

    may_outgrow = False
    """Whether a chat may be longer than the context."""
    can_move = True
    """Whether rows that were computed behind other text may be kept."""

    def __init__(self, branching: Branching) -> None:
        self.branching = branching

    # ---- a request begins -------------------------------------------------------------------

    def shorten(self, job: Job, n_ctx: int) -> None:
        """Make the job fit into a context of `n_ctx` tokens before it begins or restarts."""

    def find(self, job: Job) -> FoundLive:
        """Find what the job can continue from."""
        return self.branching.find(job)

    def open(self, job: Job, found: FoundLive, capacity: int, evict: Evict) -> LiveSeq | None:
        """Open a sequence that begins with what was found; None if none is available now."""
        return self.branching.open(job, found, capacity, evict)

    def enter(self, job: Job, seq: LiveSeq) -> None:
        """Give `seq` to the job."""
        assert not seq.is_partial, "a partial live set went to a request without a budget"
        seq.live_set = EVERYTHING

    def plan(self, job: Job, seq: LiveSeq, found: FoundLive) -> RestorePlan:
        """Plan what to restore after `seq`, which begins with what was found."""
        n = self.n_loadable(job, seq)
        return self.branching.plan(job, seq, found, n) if n else RestorePlan()

    def n_loadable(self, job: Job, seq: LiveSeq) -> int:
        """How many leading tokens may be loaded from the store: the last one is evaluated."""
        return job.n - 1

    # ---- sharing rows with others -----------------------------------------------------------

    def n_given(self, job: Job) -> int:
        """How many of its first tokens the job can share with a request of another kind."""
        return job.n

    def n_taken(self, job: Job, n: int) -> int:
        """How many of the `n` tokens that another request evaluates this job can use."""
        return n

    # ---- while it runs ----------------------------------------------------------------------

    def before_step(self, job: Job, evict: Evict) -> None:
        """Prepare for a batch with tokens of the job. Raises Unavailable if there is no room."""

    def evaluating(self, batch: list[Job], mine: list[Job]) -> AbstractContextManager[None]:
        """Wraps the evaluation of a batch. batch: its jobs, in its order; mine: those of this hook."""
        return nullcontext()

    def after_step(self, job: Job) -> None:
        """Called once the job's part of the batch was evaluated and is accounted for."""

    def awaits_recall(self, job: Job) -> bool:
        """Whether the evaluated prompt is not done yet: the next `before_step` recalls rows for it
        and has its last tokens evaluated again."""
        return False

    def prompt_done(self, job: Job, evict: Evict) -> None:
        """Called when the prompt is evaluated and the reply begins. Raises Unavailable as `before_step`."""

    def restarts_shortened(self, job: Job) -> bool:
        """Whether a job that has filled its context starts over with a shortened prompt."""
        return False

    # ---- when its sequence leaves -----------------------------------------------------------

    def leaving(self, seq: LiveSeq) -> None:
        """Called before a sequence of such a chat leaves the context."""


class Hooks:
    """The hooks of one model: chooses that of each request, and handles a batch's requests together."""

    def __init__(self, whole: Hook, shift: Hook, bounded: Hook) -> None:
        """The hooks of chats that end with their context, that drop their oldest turns, and that have
        a budget."""
        self._whole = whole
        self._shift = shift
        self._bounded = bounded

    def of(self, live: LiveBudget) -> Hook:
        """The hook of requests with the budget `live`."""
        if live.is_bounded:
            return self._bounded
        return self._shift if live.policy == "shift" else self._whole

    def of_job(self, job: Job) -> Hook:
        """The hook of a job."""
        return self.of(job.request.live)

    def of_seq(self, seq: LiveSeq) -> Hook:
        """The hook of a sequence, by the request that used it last."""
        return self.of(seq.live_set.budget)

    @contextmanager
    def evaluating(self, jobs: list[Job]) -> Iterator[None]:
        """Wraps the evaluation of the batch of `jobs`, which are in the batch's order."""
        mine = [job for job in jobs if self.of_job(job) is self._bounded]
        with self._bounded.evaluating(jobs, mine):
            yield
