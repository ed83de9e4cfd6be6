"""Many concurrent users: sessions that were recorded one by one, interleaved into one trace."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import replace

from lab.replay.trace import Call, Trace, TraceError

IDLE_S_MAX = 120.0
"""Longer pauses inside a session are cut to this, because a closed loop would wait for them."""
_START_S = 600.0


def interleave(trace: Trace, n_users: int, seed: int, idle_s_max: float = IDLE_S_MAX) -> Trace:
    """A trace of `n_users` users who each take the next session, in random order, when theirs has
    ended; they begin within the first ten minutes. Times inside a session stay, except for long
    pauses."""
    if n_users < 1:
        raise TraceError(f"there cannot be {n_users} users")
    rng = random.Random(seed)
    sessions = list(_sessions(trace, idle_s_max))
    rng.shuffle(sessions)
    free = [(rng.uniform(0.0, _START_S), user) for user in range(n_users)]
    heapq.heapify(free)
    calls: list[Call] = []
    for session in sessions:
        start_s, user = heapq.heappop(free)
        calls += (replace(call, time_s=start_s + call.time_s) for call in session)
        pause_s = rng.expovariate(1 / 60)
        heapq.heappush(free, (calls[-1].time_s + calls[-1].service_s + pause_s, user))
    calls.sort(key=lambda call: call.time_s)
    name = f"{trace.name}-{n_users}"
    return Trace(name, trace.block_tokens, trace.parents, trace.n_blocks, calls)


def _sessions(trace: Trace, idle_s_max: float) -> Iterator[list[Call]]:
    groups: dict[int, list[Call]] = {}
    for call in trace.calls:
        groups.setdefault(call.session, []).append(call)
    for calls in groups.values():
        shifted: list[Call] = []
        at_s, last_s = 0.0, calls[0].time_s
        for call in calls:
            at_s += min(call.time_s - last_s, idle_s_max)
            last_s = call.time_s
            shifted.append(replace(call, time_s=at_s))
        yield shifted
