"""The load of `lab bench agents`: like the traces, deterministic, and worth predicting."""

from __future__ import annotations

import heapq
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from planted import planted

from lab.bench.agents import load as table
from lab.bench.agents.latency import LOAD, QUICK, SHARE, SHARE_QUICK, AgentOutcome
from lab.bench.agents.load import AgentLoad, User, distinct_tokens, users
from towerd.policy import make_policy

TRACES = Path(__file__).parents[4] / "shared/data/traces/agentic_coding"


def recorded() -> Iterator[tuple[bool, list[dict[str, Any]]]]:
    """(is a sub-agent, its requests)"""
    for path in sorted(TRACES.glob("*.json.zst")):
        raw = zstandard.ZstdDecompressor().stream_reader(path.open("rb"))
        for session in json.load(io.TextIOWrapper(raw, "utf-8"))["sessions"]:
            yield False, [r for r in session["requests"] if "requests" not in r]
            for below in session["requests"]:
                if "requests" in below:
                    yield True, below["requests"]


@pytest.mark.skipif(not TRACES.exists(), reason="the traces are not there")
def test_the_table_is_what_the_traces_say() -> None:
    pauses: dict[str, list[float]] = {"tool_use": [], "end_turn": []}
    follow: dict[str, list[bool]] = {"tool_use": [], "end_turn": []}
    n_steps, lengths = [], []
    for is_below, requests in recorded():
        if not is_below:
            n_steps.append(len(requests))
        lengths += [request["in"] for request in requests]
        for before, request in zip(requests, requests[1:], strict=False):
            stop = before.get("stop")
            if stop not in pauses:
                continue
            if request.get("think_time") is not None:
                pauses[stop].append(request["think_time"])
            if request.get("stop") in pauses:
                follow[stop].append(request["stop"] == "end_turn")
    inner = np.arange(5, 100, 5) / 100
    for found, said in (
        (pauses["tool_use"], table.TOOL_PAUSES_S[1:-1]),
        (pauses["end_turn"], table.PERSON_PAUSES_S[1:-1]),
        (n_steps, table.STEPS[1:-1]),
    ):
        assert np.allclose(np.quantile(found, inner), said, rtol=0.06, atol=0.6)
    over_median = np.quantile(lengths, inner[:-1]) / np.median(lengths)
    assert np.allclose(over_median, table.LENGTHS, rtol=0.02)
    assert np.mean(follow["tool_use"]) == pytest.approx(table.P_PERSON_AFTER_TOOL, abs=1e-3)
    assert np.mean(follow["end_turn"]) == pytest.approx(table.P_PERSON_AFTER_PERSON, abs=1e-3)


@pytest.mark.parametrize("load", [LOAD, QUICK])
def test_steps_of_all_users(load: AgentLoad) -> None:
    """As many as asked for, the same every time; what comes later in a longer run is no other."""
    found = users(load, 3)
    assert found == users(load, 3) != users(load, 4)
    everything = [step for user in found for step in user.steps]
    assert len(everything) == load.requests
    assert sum(step.is_measured for step in everything) == load.requests - load.warm_requests
    for user, longer in zip(found, users(replace(load, requests=900), 3), strict=True):
        assert user.steps == longer.steps[: len(user.steps)]
        sessions = [step.session for step in user.steps]
        assert sessions == sorted(sessions)
        for before, step in zip(user.steps, user.steps[1:], strict=False):
            if step.session == before.session:
                assert step.n_new == load.step_tokens
                assert step.kind == before.kind
            else:
                assert not before.calls_tool, "a session ends with a turn"


def test_pauses_follow_the_reason() -> None:
    load = replace(LOAD, requests=20_000, pause_scale=1.0)
    everything = [step for user in users(load, 0) for step in user.steps]
    for calls_tool, median_s in ((True, 8.0), (False, 120.0)):
        pauses_s = [step.pause_s for step in everything if step.calls_tool == calls_tool]
        assert np.median(pauses_s) == pytest.approx(median_s, rel=0.05)
        assert max(pauses_s) <= 120.0


def test_share_of_busy_time() -> None:
    outcome = AgentOutcome(spans_s=[(10.0, 12.0), (1.0, 3.0), (2.0, 4.0), (2.5, 3.5)])
    assert outcome.busy == pytest.approx(5.0 / 11.0)


class Server:
    """Serves one request at a time, 50 tokens a second; what a policy keeps is found again."""

    def __init__(self, policy: str, load: AgentLoad, room: int) -> None:
        self.policy: Any = planted(lambda tree: make_policy(policy, tree))
        self.load, self.room = load, room
        self.n_tokens: dict[int, int] = dict.fromkeys(range(load.kinds), load.system_tokens)
        self.n_evaluated = 0
        self.waits_s: list[float] = []
        self.is_found: list[bool] = []

    def serve(self, at_s: float, begin_s: float, path: list[int], stop: str) -> float:
        """Returns when it is answered."""
        there = [key in self.policy for key in path]
        n_there = there.index(False)
        n_new = sum(self.n_tokens[key] for key in path[n_there:])
        self.n_evaluated += n_new
        end_s = begin_s + 0.15 + n_new / 50.0
        if n_there:
            self.policy.access(path[n_there - 1], at_s)
        for i in range(n_there, len(path)):
            parent = path[i - 1] if i else None
            self.policy.insert(path[i], self.n_tokens[path[i]], at_s, parent)
        self.policy.answered(path[-1], end_s, stop)
        for key in self.policy.victims(self.policy.nbytes - self.room, lambda _: True):
            self.policy.remove(key)
        return end_s

    def run(self, all_users: list[User]) -> float:
        """The median time to the end of a measured answer."""
        due = [(user.first_s, i, 0) for i, user in enumerate(all_users) if user.steps]
        heapq.heapify(due)
        paths: dict[int, list[int]] = {}
        sessions: dict[int, int] = {}
        free_s = last_s = 0.0
        while due:
            at_s, i, n = heapq.heappop(due)
            step = all_users[i].steps[n]
            if sessions.get(i) != step.session:
                sessions[i], paths[i] = step.session, [step.kind]
            key = len(self.n_tokens)
            self.n_tokens[key] = step.n_new + step.n_reply
            paths[i].append(key)
            last_s = max(at_s, last_s + 1e-6)
            stop = "length" if step.calls_tool else "stop"
            n_before = self.n_evaluated
            free_s = self.serve(last_s, max(at_s, free_s), paths[i], stop)
            n_evaluated = self.n_evaluated - n_before
            if step.is_measured:
                self.waits_s.append(free_s - at_s)
                n_input = sum(self.n_tokens[each] for each in paths[i])
                self.is_found.append(2 * n_evaluated <= n_input)
            if n + 1 < len(all_users[i].steps):
                heapq.heappush(due, (free_s + step.pause_s, i, n + 1))
        return float(np.median(self.waits_s))


@pytest.mark.parametrize(("load", "share"), [(LOAD, SHARE), (QUICK, SHARE_QUICK)])
def test_room_is_as_short_as_in_the_traces(load: AgentLoad, share: float) -> None:
    """LRU finds half or more of 36 % of the inputs there, with 72 users and 2 %."""
    is_found = []
    for seed in range(6):
        all_users = users(load, seed)
        lru = Server("lru", load, round(share * distinct_tokens(load, all_users)))
        lru.run(all_users)
        is_found += lru.is_found
    assert np.mean(is_found) == pytest.approx(0.36, abs=0.05)


def test_foresight_finds_more_of_it_than_lru() -> None:
    """With every seed, and not by luck: over three of them people wait less at the median."""
    ratios = []
    for seed in range(3):
        all_users = users(LOAD, seed)
        room = round(SHARE * distinct_tokens(LOAD, all_users))
        lru, ours = (Server(name, LOAD, room) for name in ("lru", "foresight"))
        ratios.append(lru.run(all_users) / ours.run(all_users))
        assert ours.n_evaluated < lru.n_evaluated
    assert np.mean(ratios) > 1.15
