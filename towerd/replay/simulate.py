"""A trace through a cache that a policy manages: what the daemon's hot tier would have done.

A request finds the longest run of segments from the root that is in the cache, evaluates the
rest, and leaves its whole input in the cache, which then shrinks to its capacity. What is given
up is gone. Answers are not cached, because traces do not say what they were.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from towerd.policy.base import Policy
from towerd.replay.trace import Call, Trace

_STEP_S = 1e-6
"""Between requests that a trace has at the same moment."""


@dataclass(slots=True)
class Outcome:
    """What happened, in blocks per request and in sums of tokens."""

    block_tokens: int
    n_input_tokens: int = 0
    n_hit_tokens: int = 0
    n_moved_blocks: int = 0
    """Written into the cache."""
    hits: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the input tokens that were found."""
        return self.n_hit_tokens / self.n_input_tokens if self.n_input_tokens else 0.0

    @property
    def n_prefilled_tokens(self) -> int:
        """Input tokens that had to be evaluated."""
        return self.n_input_tokens - self.n_hit_tokens

    def bytes_moved(self, token_bytes: int) -> int:
        """Bytes written into the cache when a token's rows have `token_bytes`."""
        return self.n_moved_blocks * self.block_tokens * token_bytes

    def count(self, call: Call, n_hit: int) -> None:
        self.hits.append(n_hit)
        self.n_input_tokens += call.n_tokens
        self.n_hit_tokens += min(call.n_tokens, n_hit * self.block_tokens)


def outcome_of(trace: Trace, hits: list[int]) -> Outcome:
    """The outcome of a replay that is known by its hits, as Belady's."""
    outcome = Outcome(trace.block_tokens)
    for call, n_hit in zip(trace.calls, hits, strict=True):
        outcome.count(call, n_hit)
        outcome.n_moved_blocks += sum(trace.n_blocks[s] for s in call.path) - n_hit
    return outcome


def replay(
    trace: Trace, policy: Policy, capacity_blocks: int, *, end_hints: bool = False
) -> Outcome:
    """Serve the trace from a cache of `capacity_blocks` that starts empty. Sizes given to the
    policy are in blocks. `end_hints`: tell the policy when nobody will go on from an input."""
    outcome = Outcome(trace.block_tokens)
    for now, call, is_answer in _events(trace):
        if is_answer:
            policy.answered(call.path[-1], now, call.stop)
            for leaf in call.ends if end_hints else ():
                policy.ended(leaf, now)
            continue
        n_hit = _serve(trace, policy, call, now, outcome)
        outcome.count(call, n_hit)
        excess = policy.nbytes - capacity_blocks
        if excess > 0:
            for victim in policy.victims(excess, _always):
                policy.remove(victim)
    return outcome


def _always(_: int) -> bool:
    return True


def _serve(trace: Trace, policy: Policy, call: Call, now: float, outcome: Outcome) -> int:
    """Use what is there, insert what is not; returns the blocks found."""
    n_hit, n_there = 0, 0
    for segment in call.path:
        if segment not in policy:
            break
        n_hit += trace.n_blocks[segment]
        n_there += 1
    if n_there:
        policy.access(call.path[n_there - 1], now)
    for i in range(n_there, len(call.path)):
        segment = call.path[i]
        policy.insert(segment, trace.n_blocks[segment], now, call.path[i - 1] if i else None)
        outcome.n_moved_blocks += trace.n_blocks[segment]
    return n_hit


def _events(trace: Trace) -> Iterator[tuple[float, Call, bool]]:
    """(time, call, is the end of its answer) in strictly rising time."""
    answers: list[tuple[float, int]] = []
    last_s = float("-inf")
    for i, call in enumerate(trace.calls):
        while answers and answers[0][0] <= call.time_s:
            at_s, answered = heapq.heappop(answers)
            last_s = max(at_s, last_s + _STEP_S)
            yield last_s, trace.calls[answered], True
        last_s = max(call.time_s, last_s + _STEP_S)
        yield last_s, call, False
        heapq.heappush(answers, (call.time_s + call.service_s, i))
    while answers:
        at_s, answered = heapq.heappop(answers)
        last_s = max(at_s, last_s + _STEP_S)
        yield last_s, trace.calls[answered], True
