"""Replays a trace through a cache that a policy manages, like the daemon's hot tier.

A request finds the longest run of segments from the root that is in the cache, evaluates the
rest, and leaves its whole input in the cache, which then shrinks to its capacity. Evicted
segments are lost. Answers are not cached, because traces do not contain them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from lab.replay.trace import Call, Trace
from towerd.policy.base import Policy

_STEP_S = 1e-6
"""Time between requests that have the same time in a trace."""


@dataclass(slots=True)
class ReplayOutcome:
    """The result of a replay, in blocks per request and in total tokens."""

    block_tokens: int
    n_input_tokens: int = 0
    n_hit_tokens: int = 0
    n_moved_blocks: int = 0
    """Tokens written into the cache."""
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


def outcome_of(trace: Trace, hits: list[int]) -> ReplayOutcome:
    """The outcome of a replay of which only the hits are known, such as Belady's."""
    outcome = ReplayOutcome(trace.block_tokens)
    for call, n_hit in zip(trace.calls, hits, strict=True):
        outcome.count(call, n_hit)
        outcome.n_moved_blocks += sum(trace.n_blocks[s] for s in call.path) - n_hit
    return outcome


def replay(
    trace: Trace, policy: Policy, capacity_blocks: int, *, end_hints: bool = False
) -> ReplayOutcome:
    """Serve the trace from a cache of `capacity_blocks` that starts empty. The policy
    was made for this trace; sizes given to it are in blocks. `end_hints`: tell the policy when no request will continue an input, and
    the steps and ends of workflows."""
    outcome = ReplayOutcome(trace.block_tokens)
    depths = trace.depths()
    for now, call, is_answer in _events(trace):
        if is_answer:
            policy.answered(call.path[-1], now, call.stop)
            if end_hints:
                _end(policy, call, now)
            continue
        n_hit = _serve(trace, depths, policy, call, now)
        outcome.n_moved_blocks += depths[call.path[-1]] - n_hit
        outcome.count(call, n_hit)
        if end_hints and call.agent:
            policy.stepped(call.path[-1], now, str(call.session), call.agent, trace.base(call))
        excess = policy.nbytes - capacity_blocks
        if excess > 0:
            for victim in policy.victims(excess, _always):
                policy.remove(victim)
    return outcome


def _always(_: int) -> bool:
    return True


def _end(policy: Policy, call: Call, now: float) -> None:
    for segment in call.ends:
        policy.ended(segment, now)
    if call.ends and call.agent:
        policy.workflow_ended(str(call.session), now)


def _serve(trace: Trace, depths: list[int], policy: Policy, call: Call, now: float) -> int:
    """Use the cached segments and insert the others; returns the blocks found. A parent outlives
    its children, so the cached segments are the upper part of the path."""
    path = call.path
    n_there = bisect_left(path, True, key=lambda segment: segment not in policy)
    if n_there:
        policy.access(path[n_there - 1], now)
    for i in range(n_there, len(path)):
        policy.insert(path[i], trace.n_blocks[path[i]], now)
    return depths[path[n_there - 1]] if n_there else 0


def _events(trace: Trace) -> Iterator[tuple[float, Call, bool]]:
    """(time, call, whether it is the end of the answer) in strictly ascending order of time."""
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
