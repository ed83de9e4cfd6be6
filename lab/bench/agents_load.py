"""Agents as they were recorded: when they come back, and how much they have to say.

The table below was counted in 444 sessions (30,000 requests) of coding agents, of
callanjfox/kv-cache-tester (Apache-2.0, see NOTICE). After a call of a tool an agent is back in
seconds, after the end of its turn a person comes back in minutes; that is what there is to
foretell, and nothing else of a session is in here. Lengths and steps are scaled down together, so
that minutes of a CPU hold hundreds of requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lab.replay.interleave import IDLE_S_MAX

Rng = np.random.Generator
_TOOL_PAUSES_S = (
    0, 3, 4, 4, 5, 5, 6, 6, 7, 8, 8, 9, 11, 13, 15, 19, 26, 40, 73, 158, 37400,
)  # fmt: skip
"""Between an answer that called a tool and the next request: quantiles, every 5 %."""
_PERSON_PAUSES_S = (
    0, 3, 5, 11, 33, 60, 91, 118, 149, 184, 230, 306, 377, 486, 690, 980, 1400, 2390, 3540, 11200,
    77400,
)  # fmt: skip
"""After an answer that ended the turn."""
_P_PERSON_AFTER_TOOL = 0.051
"""That the answer to a tool's result ends the turn."""
_P_PERSON_AFTER_PERSON = 0.215
_STEPS = (
    3, 5, 7, 9, 14, 19, 23, 26, 31, 35, 42, 52, 61, 68, 79, 92, 113, 134, 152, 234, 514,
)  # fmt: skip
"""Requests of a session."""
_LENGTHS = (
    0.30, 0.41, 0.49, 0.57, 0.64, 0.72, 0.79, 0.86, 0.93, 1.0, 1.07, 1.14, 1.2, 1.27, 1.34, 1.42,
    1.7, 2.31,
)  # fmt: skip
"""Of an input, over the median: quantiles of 5 to 90 %."""


REFERENCE_TOKENS_PER_S = 50.0
"""Prompt tokens: for a server of this speed pauses are as `pause_scale` says."""


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens. first_tokens: what a session begins with, at the median, besides the
    system prompt of its kind (recorded sessions share 7 % of their first input with earlier ones,
    most of them nothing); step_tokens: what each request adds to the answer before it;
    requests: in all, of which the first `warm_requests` only teach and fill the tiers.
    steps_scale, pause_scale: over those of the table."""

    users: int
    requests: int
    warm_requests: int
    first_tokens: int
    kinds: int = 3
    system_tokens: int = 4
    step_tokens: int = 1
    tool_reply_tokens: int = 1
    turn_reply_tokens: int = 2
    steps_scale: float = 0.25
    pause_scale: float = 2.6


@dataclass(slots=True)
class Step:
    """One request. session: the sessions that this user had before; n_new: tokens that it adds
    to the input and the answer before it; n_reply: of its answer; pause_s: until the request
    after it, at the speed of reference."""

    session: int
    kind: int
    n_new: int
    n_reply: int
    calls_tool: bool
    pause_s: float
    is_measured: bool = True


@dataclass(frozen=True, slots=True)
class User:
    """first_s: when the first step begins."""

    first_s: float
    steps: list[Step]


def users(load: Load, seed: int) -> list[User]:
    """Everybody's steps: the first `load.requests` that there would be if nobody had to wait
    for an answer, so that they are the same however long that takes."""
    rng = np.random.default_rng(seed)
    spread_s = load.pause_scale * float(np.mean(np.minimum(_TOOL_PAUSES_S, IDLE_S_MAX)))
    found = [User(float(rng.uniform(0.0, spread_s)), []) for _ in range(load.users)]
    coming = [_steps(load, user, seed) for user in range(load.users)]
    due = [(user.first_s, i) for i, user in enumerate(found)]
    heapq.heapify(due)
    for n in range(load.requests):
        at_s, i = heapq.heappop(due)
        step = next(coming[i])
        step.is_measured = n >= load.warm_requests
        found[i].steps.append(step)
        heapq.heappush(due, (at_s + step.pause_s, i))
    return found


def distinct_tokens(load: Load, everybody: Sequence[User]) -> int:
    """What an unlimited store would hold in the end."""
    own = sum(step.n_new + step.n_reply for user in everybody for step in user.steps)
    return load.kinds * load.system_tokens + own


def _steps(load: Load, user: int, seed: int) -> Iterator[Step]:
    """What one user does, session after session, for ever. Lengths are spread evenly over the
    users: drawn at random their sum would differ too much from seed to seed."""
    rng = np.random.default_rng([seed, user])
    session, calls_tool = 0, True
    while True:
        n_steps = max(2, round(load.steps_scale * _draw(rng, _STEPS)))
        kind = int(rng.integers(load.kinds))
        at = (user + session * load.users // 3) % load.users
        n_new = max(1, round(load.first_tokens * _quantile(_LENGTHS, (at + 0.5) / load.users)))
        for left in range(n_steps - 1, -1, -1):
            p_person = _P_PERSON_AFTER_TOOL if calls_tool else _P_PERSON_AFTER_PERSON
            calls_tool = left > 0 and bool(rng.random() >= p_person)
            pauses_s = _TOOL_PAUSES_S if calls_tool else _PERSON_PAUSES_S
            pause_s = load.pause_scale * min(IDLE_S_MAX, _draw(rng, pauses_s))
            n_reply = load.tool_reply_tokens if calls_tool else load.turn_reply_tokens
            yield Step(session, kind, n_new, n_reply, calls_tool, pause_s)
            n_new = load.step_tokens
        session += 1


def _draw(rng: Rng, quantiles: Sequence[float]) -> float:
    return _quantile(quantiles, float(rng.random()))


def _quantile(quantiles: Sequence[float], share: float) -> float:
    """Straight lines between the quantiles."""
    return float(np.interp(share * (len(quantiles) - 1), range(len(quantiles)), quantiles))
