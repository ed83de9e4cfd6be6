"""Requests that are counted without rows are those of the shared tier's own code, and those counted by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lab.scale.counted import CountedTier, n_probes
from lab.scale.prices import MACHINES, STORES
from lab.scale.real import RealTier
from lab.scale.scaling import FleetSizes, break_even, count_tenant, scaled
from lab.scale.sessions import RecordedSession, Sample
from lab.scale.work import Fleet, TierHabits
from towerd.tiers.shared.objects import PART_BYTES

Counts = tuple[int, int, int, dict[str, int], int]
ONE = RecordedSession(-1, 0, (1024,), (0,), (0,))
"""One prompt, which nothing else begins like."""


def random_sessions(seed: int, n: int = 6, grown: int = 700) -> list[RecordedSession]:
    """Sessions that grow, lose their ends, come back at once or later, some behind one of two bases."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        base = rng.choice((-1, 0, 1))
        shared = (0, 400, 512)[base + 1]
        prompts, lost, pauses = [shared + rng.randint(1, grown)], [0], [0]
        for _ in range(rng.randrange(6)):
            gone = rng.choice((0, 0, 1, rng.randint(1, prompts[-1])))
            kept = prompts[-1] - gone
            prompts.append(kept + rng.randint(1, grown))
            lost.append(gone)
            pauses.append(rng.choice((0, 4, 5, 60)))
        found.append(RecordedSession(base, shared, tuple(prompts), tuple(lost), tuple(pauses)))
    return found


def played(
    tier: RealTier | CountedTier, sessions: list[RecordedSession], habits: TierHabits
) -> list[Counts]:
    """The requests for rows and marks after the bases, and after each session."""
    fleet = Fleet(tier, habits)
    fleet.put_bases(sessions)
    found = [counts(tier)]
    for number, session in enumerate(sessions):
        fleet.play(number, session)
        found.append(counts(tier))
    return found


def counts(tier: RealTier | CountedTier) -> Counts:
    """PUT, GET, HEAD, objects by folder, and tokens that were not evaluated."""
    of = tier.requests if isinstance(tier, RealTier) else tier.rows
    return of.put, of.get, of.head, dict(of.stored), of.tokens_fetched


HABITS = [TierHabits(), TierHabits("end", 0.0, 1.0), TierHabits("turn", 0.5, 0.5)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("habits", HABITS, ids=["pinned", "pulled", "away"])
def test_counts_are_those_of_the_shared_tier(seed: int, habits: TierHabits, tmp_path: Path) -> None:
    sessions = random_sessions(seed)
    with RealTier(tmp_path, 16) as tier:
        real = played(tier, sessions, habits)
    assert played(CountedTier(16), sessions, habits) == real
    assert real[-1][0] > len(sessions)


def test_counts_of_objects_in_several_parts(tmp_path: Path) -> None:
    sessions = random_sessions(3, n=3, grown=300)
    habits = TierHabits("turn", 0.5, 1.0)
    with RealTier(tmp_path, 20_000) as tier:
        real = played(tier, sessions, habits)
        assert tier.requests.stored_bytes["objects"] > 2 * PART_BYTES
    assert played(CountedTier(20_000), sessions, habits) == real


def test_one_session_by_hand() -> None:
    """1,023 rows of 16 KiB are four parts; marks are at 256, 512, 768 and the end; and a record."""
    tier = CountedTier(1 << 14)
    Fleet(tier, TierHabits(pulled=0.0)).play(0, ONE)
    assert tier.rows.stored == {"objects": 4, "marks": 4}
    requests = tier.take()
    assert requests.stored == {"objects": 4, "marks": 4, "sessions": 1}
    assert requests.put == 4 + 4 + 1
    # two keys: at tokens 1,024 and 1,023 nothing is there
    assert requests.get == 2 * 2
    # a lookup by two keys of the first and the last mark; the first and the last part; these marks; each mark; the record
    assert requests.head == 2 * 2 + 2 + 2 + 4 + 1
    assert requests.list == 1
    rows = 1023 << 14
    assert rows < requests.stored_bytes["objects"] < rows + 8192


def test_lookup_of_a_long_prompt() -> None:
    """The most for 32,768 tokens, and two requests where there is nothing."""
    assert n_probes(1, 128, 0) == 2
    assert max(n_probes(1, 128, furthest) for furthest in range(129)) == 15


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
    tier.take()
    for number in range(5 * len(sessions)):
        fleet.play(number, sessions[number % len(sessions)])
    assert count_tenant(sample_of(*sessions), 5 * len(sessions), habits, 64).own == tier.take()


def test_dollars_of_a_thousand_sessions() -> None:
    token_bytes, store, machine = 1 << 14, STORES["s3"], MACHINES["8b-h100"]
    habits = TierHabits(pulled=0.0)
    tenant = count_tenant(sample_of(ONE), 1000, habits, token_bytes)
    found = scaled(1000, tenant, FleetSizes(), store, machine)
    assert found.requests_cost == pytest.approx(10_000 * 5e-6 + (4000 + 13_000) * 4e-7)
    assert found.storage_cost == pytest.approx(found.requests.n_bytes / 1e9 * 0.023)
    assert found.saved_cost == 0
    many = scaled(10**9, tenant, FleetSizes(), store, machine)
    assert many.cost == pytest.approx(1e6 * found.cost)
    assert many.puts_a_second == pytest.approx(1e10 / (30 * 86400) * 3)


def test_rows_pay_with_enough_fetches() -> None:
    """At the number of fetches that breaks even, both ways cost the same."""
    habits, machine = TierHabits("end"), MACHINES["70b-4h100"]
    found = break_even(machine, 5.5, sample_of(*random_sessions(2)), habits, STORES["s3"])
    n = found.fetches_a_month
    assert found.put + found.month + n * found.fetch == pytest.approx(n * found.prefill)
    token_dollars = found.token_bytes / 1e9 * 0.09
    assert found.outside == pytest.approx(1e6 * token_dollars, rel=0.05)  # headers and records
    dear = replace(found, fetch=2 * found.prefill)
    assert dear.fetches_a_month == float("inf")
