"""Hook: what the scheduler asks, at named moments of a request, about what of its chat stays live.

This one is that of most requests: everything stays, and a chat ends with its context. Others say at
which moments they do something else. Called by the inference thread only.
"""

from __future__ import annotations

from towerd.engine.embedded.longchat.live_set import EVERYTHING
from towerd.engine.embedded.restore.branching import Branching, Evict, Found
from towerd.engine.embedded.scheduling.job import Job
from towerd.engine.embedded.scheduling.pool import LiveSeq


class Hook:
    """Everything stays live."""

    may_outgrow = False
    """Whether a chat may be longer than the context."""
    can_splice = True
    """Whether rows that were computed elsewhere may be spliced in."""

    def __init__(self, branching: Branching) -> None:
        self.branching = branching

    # ---- a request begins -------------------------------------------------------------------

    def shorten(self, job: Job, n_ctx: int) -> None:
        """It is about to begin, maybe again: make it fit into a context of `n_ctx` tokens."""

    def find(self, job: Job) -> Found:
        """What to go on from."""
        return self.branching.find(job)

    def n_at_hand(self, job: Job) -> int:
        """How many of its tokens it could go on from now, without what is stored."""
        return self.branching.n_at_hand(job)

    def open(self, job: Job, found: Found, capacity: int, evict: Evict) -> LiveSeq | None:
        """A sequence that begins with what was found; None if none can be had now."""
        return self.branching.open(job, found, capacity, evict)

    def enter(self, job: Job, seq: LiveSeq) -> None:
        """`seq` is the job's from now on."""
        assert not seq.is_thinned, "a thinned sequence went to a request without a budget"
        seq.live_set = EVERYTHING

    def n_loadable(self, job: Job, seq: LiveSeq) -> int:
        """Up to which of its tokens stored rows may be loaded: the last one has to be evaluated."""
        return job.n - 1

    # ---- what others may have ---------------------------------------------------------------

    def n_given(self, job: Job) -> int:
        """How many of the job's first tokens its sequence can give to a request of another kind."""
        return job.n

    def n_taken(self, job: Job, n: int) -> int:
        """How many of `n` tokens that another request evaluates the job can use."""
        return n

    # ---- it runs ----------------------------------------------------------------------------

    def before_step(self, job: Job, evict: Evict) -> None:
        """The next batch may have tokens of the job. Raises Unavailable if there is no room."""

    def n_queries(self, job: Job) -> int:
        """How many of its tokens in the batch, the last ones, will be asked what they attend to."""
        return 0

    def after_step(self, job: Job) -> None:
        """Its part of the batch was evaluated and is accounted for."""

    def is_asking(self, job: Job) -> bool:
        """Whether its prompt, which is evaluated, is not done yet: the next `before_step` takes
        its last tokens back."""
        return False

    def prompt_done(self, job: Job) -> None:
        """Its prompt is evaluated; the reply begins."""

    def begins_again(self, job: Job) -> bool:
        """Whether the job, which has filled its context, is to begin anew, shortened."""
        return False

    # ---- its sequence goes ------------------------------------------------------------------

    def leaving(self, seq: LiveSeq) -> None:
        """A sequence of such a chat is about to leave the context."""
