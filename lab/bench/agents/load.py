"""Agents as recorded: when they come back, and how long their requests are.

The table below was counted in 444 sessions (30,000 requests) of coding agents, of
callanjfox/kv-cache-tester (Apache-2.0, see NOTICE). After a tool call an agent is back in
seconds, after the end of its turn a person comes back in minutes. That is all there is to predict;
nothing else of a session is modelled. Lengths and steps are scaled down together, so that hundreds
of requests fit into minutes on a CPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lab.replay.interleave import IDLE_S_MAX

Rng = np.random.Generator
TOOL_PAUSES_S = (
    0, 3, 4, 4, 5, 5, 6, 6, 7, 8, 8, 9, 11, 13, 15, 19, 26, 40, 73, 158, 37400,
)  # fmt: skip
"""Pauses between an answer that called a tool and the next request: quantiles, every 5 %."""
PERSON_PAUSES_S = (
    0, 3, 5, 11, 33, 60, 91, 118, 149, 184, 230, 306, 377, 486, 690, 980, 1400, 2390, 3540, 11200,
    77400,
)  # fmt: skip
"""Pauses after an answer that ended the turn."""
P_PERSON_AFTER_TOOL = 0.051
"""Probability that the answer to a tool's result ends the turn."""
P_PERSON_AFTER_PERSON = 0.215
STEPS = (
    3, 5, 7, 9, 14, 19, 23, 26, 31, 35, 42, 52, 61, 68, 79, 92, 113, 134, 152, 234, 514,
)  # fmt: skip
"""Requests of a session."""
LENGTHS = (
    0.30, 0.41, 0.49, 0.57, 0.64, 0.72, 0.79, 0.86, 0.93, 1.0, 1.07, 1.14, 1.2, 1.27, 1.34, 1.42,
    1.7, 2.31,
)  # fmt: skip
"""Lengths of an input over the median: quantiles of 5 to 90 %."""


REFERENCE_TOKENS_PER_S = 50.0
"""Prompt tokens per second: for a server of this speed, pauses are scaled by `pause_scale`."""


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """The size of the load; lengths in tokens. first_tokens: the median length of a session's first
    input besides the system prompt of its kind (recorded sessions share 7 % of their first input
    with earlier ones, most of them nothing); step_tokens: what each request adds to the answer
    before it; requests: their total number, of which the first `warm_requests` only train the
    policy and fill the tiers; steps_scale, pause_scale: factors on those of the table."""

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
class AgentStep:
    """One request. session: number of this user's earlier sessions; n_new: tokens that it adds to
    the input and answer before it; n_reply: tokens of its answer; pause_s: the pause before the
    next request, at the reference speed."""

    session: int
    kind: int
    n_new: int
    n_reply: int
    calls_tool: bool
    pause_s: float
    is_measured: bool = True


@dataclass(frozen=True, slots=True)
class User:
    """A user's requests. first_s: when the first one is sent."""

    first_s: float
    steps: list[AgentStep]


def users(load: AgentLoad, seed: int) -> list[User]:
    """The steps of all users: the first `load.requests` if every answer came at once, so that they
    do not depend on how long answers take."""
    rng = np.random.default_rng(seed)
    spread_s = load.pause_scale * float(np.mean(np.minimum(TOOL_PAUSES_S, IDLE_S_MAX)))
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


def distinct_tokens(load: AgentLoad, all_users: Sequence[User]) -> int:
    """Tokens that an unlimited store would hold in the end."""
    own = sum(step.n_new + step.n_reply for user in all_users for step in user.steps)
    return load.kinds * load.system_tokens + own


def _steps(load: AgentLoad, user: int, seed: int) -> Iterator[AgentStep]:
    """The steps of one user, session after session, without end. Lengths are spread evenly over the
    users: if they were drawn at random, their sum would vary too much with the seed."""
    rng = np.random.default_rng([seed, user])
    session, calls_tool = 0, True
    while True:
        n_steps = max(2, round(load.steps_scale * _draw(rng, STEPS)))
        kind = int(rng.integers(load.kinds))
        at = (user + session * load.users // 3) % load.users
        n_new = max(1, round(load.first_tokens * _quantile(LENGTHS, (at + 0.5) / load.users)))
        for left in range(n_steps - 1, -1, -1):
            p_person = P_PERSON_AFTER_TOOL if calls_tool else P_PERSON_AFTER_PERSON
            calls_tool = left > 0 and bool(rng.random() >= p_person)
            pauses_s = TOOL_PAUSES_S if calls_tool else PERSON_PAUSES_S
            pause_s = load.pause_scale * min(IDLE_S_MAX, _draw(rng, pauses_s))
            n_reply = load.tool_reply_tokens if calls_tool else load.turn_reply_tokens
            yield AgentStep(session, kind, n_new, n_reply, calls_tool, pause_s)
            n_new = load.step_tokens
        session += 1


def _draw(rng: Rng, quantiles: Sequence[float]) -> float:
    return _quantile(quantiles, float(rng.random()))


def _quantile(quantiles: Sequence[float], share: float) -> float:
    """The quantile at `share`, interpolated linearly."""
    return float(np.interp(share * (len(quantiles) - 1), range(len(quantiles)), quantiles))
