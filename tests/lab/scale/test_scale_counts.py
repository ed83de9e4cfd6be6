"""Requests that are counted without rows are those of the shared tier's own code, and those counted by hand."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import pytest

from lab.scale.counted import CountedTier, n_probes
from lab.scale.prices import MACHINES, STORES
from lab.scale.real import RealTier
from lab.scale.requests import Requests
from lab.scale.scaling import FleetSizes, break_even, count_tenant, scaled
from lab.scale.sessions import RecordedSession, Sample
from lab.scale.work import Fleet, TierHabits
from towerd.tiers.shared.objects import PART_BYTES

ONE = RecordedSession(-1, 0, (1024,), (0,), (0,))
"""One prompt, which nothing else begins like."""


def random_sessions(seed: int, n: int = 8, tokens_max: int = 1500) -> list[RecordedSession]:
    """Sessions that grow, lose their ends, come back at once or later, some behind one of two bases."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        base = rng.choice((-1, 0, 1))
        shared = (0, 400, 512)[base + 1]
        prompts, lost, pauses = [shared + rng.randint(1, 900)], [0], [0]
        for _ in range(rng.randrange(6)):
            gone = rng.choice((0, 0, 1, rng.randint(1, prompts[-1])))
            kept = prompts[-1] - gone
            prompts.append(min(tokens_max, kept + rng.randint(0, 700)) or 1)
            lost.append(gone)
            pauses.append(rng.choice((0, 4, 5, 60)))
        found.append(RecordedSession(base, shared, tuple(prompts), tuple(lost), tuple(pauses)))
    return found


def requests_of(
    tier: RealTier | CountedTier, sessions: list[RecordedSession], habits: TierHabits
) -> list[Requests]:
    """After the bases, and after each session."""
    fleet = Fleet(tier, habits)
    fleet.put_bases(sessions)
    found = [deepcopy(tier.requests)]
    for number, session in enumerate(sessions):
        fleet.play(number, session)
        found.append(deepcopy(tier.requests))
    return found


HABITS = [TierHabits(), TierHabits("end", 0.0, 1.0), TierHabits("turn", 0.5, 0.5)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("habits", HABITS, ids=["pinned", "pulled", "away"])
def test_counts_are_those_of_the_real_code(seed: int, habits: TierHabits) -> None:
    sessions = random_sessions(seed)
    real, counted = (requests_of(tier, sessions, habits) for tier in (RealTier(8), CountedTier(8)))
    assert counted == real
    assert real[-1].put


def test_counts_of_objects_in_several_parts() -> None:
    token_bytes = 20_000
    sessions = random_sessions(3, n=3, tokens_max=900)
    habits = TierHabits("turn", 0.5, 1.0)
    real = requests_of(RealTier(token_bytes), sessions, habits)
    assert requests_of(CountedTier(token_bytes), sessions, habits) == real
    assert real[-1].stored_bytes["objects"] > 2 * PART_BYTES


def test_one_session_by_hand() -> None:
    """1,023 rows of 16 KiB are four parts; marks are at 256, 512, 768 and the end; and a record."""
    tier = CountedTier(1 << 14)
    Fleet(tier, TierHabits(pulled=0.0)).play(0, ONE)
    assert tier.requests.stored == {"objects": 4, "marks": 4, "sessions": 1}
    assert tier.requests.put == 4 + 4 + 1
    # two keys: at tokens 1,024 and 1,023 nothing is there
    assert tier.requests.get == 2 * 2
    # a lookup by two keys; parts; the furthest mark; each mark; the record
    assert tier.requests.head == 2 + 4 + 1 + 4 + 1
    rows = 1023 << 14
    assert rows < tier.requests.stored_bytes["objects"] < rows + 8192


def test_lookup_of_a_long_prompt() -> None:
    """What docs/shared.md says of 32,768 tokens, and one request where there is nothing."""
    assert n_probes(1, 128, 0) == 1
    assert 1 + max(n_probes(1, 128, furthest) for furthest in range(129)) == 14  # and it is read


def sample_of(*sessions: RecordedSession) -> Sample:
    tokens = sum(sum(each.prompts) for each in sessions)
    return Sample("made", len(sessions), 1, tokens, (), (), (), (), sessions)


def test_many_sessions_are_as_many_times_one() -> None:
    """Rounds that are not played are as the second one: as many sessions of one tenant, played whole."""
    sessions = random_sessions(1)
    habits = TierHabits(away=0.0, pulled=0.0)
    tier = CountedTier(64)
    fleet = Fleet(tier, habits)
    fleet.put_bases(sessions)
    tier.requests = Requests()
    for number in range(5 * len(sessions)):
        fleet.play(number, sessions[number % len(sessions)])
    assert count_tenant(sample_of(*sessions), 5 * len(sessions), habits, 64).own == tier.requests


def test_dollars_of_a_thousand_sessions() -> None:
    token_bytes, store, machine = 1 << 14, STORES["s3"], MACHINES["8b-h100"]
    habits = TierHabits(pulled=0.0)
    tenant = count_tenant(sample_of(ONE), 1000, habits, token_bytes)
    found = scaled(1000, tenant, FleetSizes(), store, machine)
    assert found.requests_cost == pytest.approx(9000 * 5e-6 + (4000 + 12_000) * 4e-7)
    assert found.storage_cost == pytest.approx(found.requests.n_bytes / 1e9 * 0.023)
    assert found.saved_cost == 0
    many = scaled(10**9, tenant, FleetSizes(), store, machine)
    assert many.cost == pytest.approx(1e6 * found.cost)
    assert many.puts_a_second == pytest.approx(9e9 / (30 * 86400) * 3)


def test_rows_pay_with_enough_fetches() -> None:
    """At the number of fetches that breaks even, both ways cost the same."""
    habits, machine = TierHabits("end"), MACHINES["70b-4h100"]
    found = break_even(machine, 5.5, sample_of(*random_sessions(2)), habits, STORES["s3"])
    n = found.fetches_a_month
    assert found.put + found.month + n * found.fetch == pytest.approx(n * found.prefill)
    dear = replace(found, fetch=2 * found.prefill)
    assert dear.fetches_a_month == float("inf")
