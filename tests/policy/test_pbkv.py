"""PBKV against direct evaluation of its formulas, its bound, and its order; KVFlow."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Planted, planted

from towerd.policy.base import Entry, Rank
from towerd.policy.pbkv import PBKV
from towerd.policy.predict.base import END, N_STEPS, Forecast, NoPrediction, survival
from towerd.policy.workflow_tree import RUN_IDLE_S, RUNS_MAX, WorkflowTree

AGENTS = ["planner", "coder", "tester"]


def always(key: int) -> bool:
    return True


class Fixed:
    """A random forecast for each path; noise moves it towards another distribution."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self.seed, self.noise = seed, noise

    def forecast(self, path: Sequence[str]) -> Forecast:
        return [dict(zip([*AGENTS, END], row, strict=True)) for row in self.rows(path, self.noise)]

    def rows(self, path: Sequence[str], noise: float) -> list[list[float]]:
        rng = np.random.default_rng([self.seed, *(AGENTS.index(name) for name in path)])
        true, other = rng.dirichlet(np.ones(4), N_STEPS), rng.dirichlet(np.ones(4), N_STEPS)
        mixed: list[list[float]] = ((1 - noise) * true + noise * other).tolist()
        return mixed

    def observe(self, path: Sequence[str]) -> None:
        pass


def equation_2(
    users: Mapping[str, set[str]], forecasts: Mapping[str, Forecast], gamma: float
) -> float:
    """Score(c) as printed: over k, over active workflows, s A . P."""
    score = 0.0
    for k in range(1, N_STEPS + 1):
        for workflow, agents in users.items():
            steps = forecasts[workflow]
            alive = 1.0
            for j in range(1, k):
                alive *= 1.0 - steps[j - 1][END]
            score += gamma ** (k - 1) * alive * sum(steps[k - 1][agent] for agent in agents)
    return score


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(AGENTS), st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=30,
)


@settings(deadline=None)
@given(STEPS, st.floats(0.1, 0.9), st.integers(0, 99))
def test_score_is_equation_2(
    steps: list[tuple[int, str, int, bool]], gamma: float, seed: int
) -> None:
    """After any steps, ends and removals; victims are in its order, retired ones first."""
    predictor = Fixed(seed)
    policy = planted(lambda tree: PBKV(tree, predictor, gamma=gamma))
    users: dict[int, dict[str, set[str]]] = {}
    paths: dict[str, list[str]] = {}
    over: dict[int, int] = {}
    for i, (number, agent, key, ends) in enumerate(steps):
        workflow = f"w{number}"
        policy.insert(key, 10, float(i), None)
        policy.stepped(key, float(i), workflow, agent)
        users.setdefault(key, {}).setdefault(workflow, set()).add(agent)
        paths.setdefault(workflow, []).append(agent)
        if ends:
            policy.workflow_ended(workflow, float(i))
            del paths[workflow]
            for key_of, by in users.items():
                if by.pop(workflow, None) is not None:
                    over[key_of] = over.get(key_of, 0) + 1
    forecasts = {workflow: predictor.forecast(path) for workflow, path in paths.items()}
    for key, by in users.items():
        assert policy.score(key) == pytest.approx(equation_2(by, forecasts, gamma))
        step_1 = sum(forecasts[w][0][a] for w, agents in by.items() for a in agents)
        assert policy.value(key) == pytest.approx(step_1)
        assert policy.is_retired(key) == (not by and key in over)
    order = policy.victims(10**9, always)
    retired = [policy.is_retired(key) for key in order]
    assert retired == sorted(retired, reverse=True), "retired before active"
    ranks = [over[key] if policy.is_retired(key) else policy.score(key) for key in order]
    n = sum(retired)
    assert ranks[:n] == sorted(ranks[:n])
    assert ranks[n:] == pytest.approx(sorted(ranks[n:]))


@pytest.mark.parametrize("noise", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_regret_stays_under_its_bound(noise: float) -> None:
    """Theorem G.4, over unit sizes: the true score of the victims, less that of the best set."""
    gamma = 0.7
    for seed in range(40):
        rng = random.Random(seed)
        noisy = PBKV(Planted(), Fixed(seed, noise), gamma=gamma)
        truth = PBKV(Planted(), Fixed(seed), gamma=gamma)
        for key in range(20):
            for policy in (noisy, truth):
                policy.insert(key, 1, 0.0)
        for i in range(30):
            key, workflow, agent = rng.randrange(20), f"w{rng.randrange(5)}", rng.choice(AGENTS)
            for policy in (noisy, truth):
                policy.stepped(key, float(i), workflow, agent)
        evicted = noisy.victims(7, always)
        score = {key: truth.score(key) for key in range(20)}
        best = sorted(score, key=lambda key: score[key])[:7]
        regret = sum(score[key] for key in evicted) - sum(score[key] for key in best)
        bound = sum(_error(noisy, truth, key, gamma) for key in set(evicted) ^ set(best))
        bound *= (1 - gamma**N_STEPS) / (2 * (1 - gamma))
        assert -1e-9 <= regret <= bound + 1e-9
        if noise == 0.0:
            assert regret == pytest.approx(0.0)


def _error(noisy: PBKV, truth: PBKV, key: int, gamma: float) -> float:
    """epsilon_c^gamma: discounted L1 distances of the forecasts of its workflows."""
    total = 0.0
    for workflow in truth.users.get(key, {}):
        steps = zip(noisy.runs[workflow].forecast, truth.runs[workflow].forecast, strict=True)
        for k, (said, true) in enumerate(steps):
            total += gamma**k * sum(abs(said[name] - true[name]) for name in true)
    return total


def test_a_path_belongs_to_the_step() -> None:
    """All keys of the path are used by the agent; parents are evicted after their children."""
    policy = planted(PBKV)
    for key in range(1, 5):
        policy.insert(key, 10, 0.0, key - 1 if key > 1 else None)
    policy.stepped(4, 1.0, "w", "coder")
    policy.insert(9, 10, 2.0, 2)
    assert set(policy.users) == {1, 2, 3, 4}
    policy.split(3, 7, 4, 3.0)
    assert policy.users[7] == {"w": {"coder"}}
    policy.workflow_ended("w", 4.0)
    assert policy.victims(16, always) == [4, 3]
    assert policy.explain(4, 5.0)["retired"]


class ByUse(WorkflowTree):
    """The order of the last use."""

    def _rank(self, entry: Entry) -> Rank:
        return 0.0, entry.used


def test_endless_workflows_age_out_and_floods_are_bounded() -> None:
    """Without an end signal, and with ids that never repeat."""
    policy = planted(lambda tree: ByUse(tree, NoPrediction()))
    policy.insert(1, 10, 0.0, None)
    for i in range(RUNS_MAX + 50):
        policy.stepped(1, i / 1e6, f"w{i}", "a")
    assert len(policy.runs) == len(policy.users[1]) == RUNS_MAX
    policy.stepped(1, 1.0 + RUN_IDLE_S, "late", "a")
    assert list(policy.runs) == ["late"]
    for i in range(1000):
        policy.stepped(1, 2.0 + RUN_IDLE_S, "late", f"agent {i}")
    assert len(policy.runs["late"].agents) <= 257
    assert len(policy.runs["late"].path) <= 64
    policy.stepped(1, 3.0 + RUN_IDLE_S, "another", "a")
    policy.remove(1)
    assert set(policy.users) == {1}, "several workflows use it, so it may come back"
    policy.forget(1)
    assert not policy.users


def test_a_lie_about_an_end_costs_only_the_liar() -> None:
    """A workflow that continues after its end is active again; others are not affected."""
    policy = planted(PBKV)
    policy.insert(1, 10, 0.0, None)
    policy.insert(2, 10, 0.0, None)
    for i in range(4):
        policy.stepped(1, float(i), "liar", "a")
        policy.stepped(2, float(i), "honest", "a")
    policy.workflow_ended("liar", 5.0)
    policy.workflow_ended("never seen", 5.0)
    assert policy.victims(10, always) == [1]
    policy.stepped(1, 6.0, "liar", "a")
    assert not policy.is_retired(1)


def test_survival() -> None:
    forecast = [{END: 0.5, "a": 0.5}, {END: 0.25, "a": 0.75}, {"a": 1.0}]
    assert survival(forecast) == [1.0, 0.5, 0.375]
