"""What one tenant's workflows do changes no forecast for another's, in any policy that predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Planted

from lab.predict.runs import FinishedRun
from lab.predict.train_mixture import save, train_mixture
from towerd.policy import make_policy
from towerd.policy.predict.base import Forecast, Share
from towerd.policy.predict.markov import CONTEXTS_KEPT, CONTEXTS_MAX, Markov, learn
from towerd.policy.predict.tenants import TENANTS_MAX, TenantPredictors
from towerd.policy.workflow_tree import AGENTS_MAX

WORKFLOWS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), max_size=6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predictor") / "p.npz"
    save(train_mixture([FinishedRun(("a", "b", "c")), FinishedRun(("a", "c"))] * 9, None), path)
    return path


def forecasts(policy: Any, tenant: str, workflows: list[list[str]]) -> Iterator[Forecast]:
    """What the policy expects after each step of a tenant's workflows, while they run."""
    for i, agents in enumerate(workflows):
        name = f"{tenant}\n{i}"
        for agent in agents:
            policy.stepped(1, float(i), name, f"{tenant}\n{agent}")
            yield policy.runs[name].forecast
        policy.workflow_ended(name, float(i))


@pytest.mark.parametrize("name", ["foresight", "foresight with a predictor", "pbkv"])
@settings(deadline=None, max_examples=40)
@given(mine=WORKFLOWS, theirs=WORKFLOWS)
def test_others_change_nothing(
    name: str, trained: Path, mine: list[list[str]], theirs: list[list[str]]
) -> None:
    """The same forecasts as in a daemon of one's own, step by step."""
    kind, _, file = name.partition(" ")
    alone, shared = (make_policy(kind, Planted(), trained if file else None) for _ in range(2))
    want = list(forecasts(alone, "me", mine))
    both = zip_longest(forecasts(shared, "me", mine), forecasts(shared, "other", theirs))
    assert [found for found, _ in both][: len(want)] == want


def test_every_tenant_resumes() -> None:
    old, new = (TenantPredictors(lambda share: Markov(share=share)) for _ in range(2))
    learn(old, ["me\na", "me\nb"])
    learn(old, ["other\na", "other\nc"])
    new.recall(json.loads(json.dumps(old.learned())))
    for tenant in ("me", "other", "third"):
        path = [f"{tenant}\na"]
        assert new.forecast(path) == old.forecast(path)
    assert new.forecast(["me\na"])[0]["me\nb"] > 0.5


def test_steps_of_agents_beyond_the_limit_stay_with_their_tenant() -> None:
    policy: Any = make_policy("pbkv", Planted())
    for i in range(AGENTS_MAX + 100):
        policy.stepped(1, float(i), "other\nw", f"other\n{i}")
    assert policy.runs["other\nw"].path[-1] == "other\n"
    assert policy.predictor.forecast(["me\na"]) == ()
    assert policy.predictor.forecast(["other\nnew"]) != ()


def test_a_flood_pushes_out_its_own() -> None:
    """Memory is shared out among tenants, and what is kept over a restart, too."""
    predictors = TenantPredictors(lambda share: Markov(1, share))
    for _ in range(3):
        predictors.observe(["me\na", "me\nb"])
    for i in range(CONTEXTS_MAX // 2):
        predictors.observe([f"other\n{i}", f"other\n{i + 1}"])
    found: Any = predictors.learned()
    assert predictors.forecast(["me\na"]) == [{"me\nb": 1.0}, {}, {}]
    assert found["me"]["contexts"]
    assert 0 < len(found["other"]["contexts"]) <= CONTEXTS_KEPT // 2


def test_the_number_of_tenants_is_bounded() -> None:
    made: list[Share] = []

    def make(share: Share) -> Markov:
        made.append(share)
        return Markov(1, share)

    predictors = TenantPredictors(make)
    for i in range(TENANTS_MAX + 5):
        predictors.observe([f"{i}\na", f"{i}\nb"])
        predictors.observe(["busy\na", "busy\nb"])
    assert len(predictors.learned()) == TENANTS_MAX
    assert predictors.forecast(["busy\na"])
    assert made[0]() == pytest.approx(1 / TENANTS_MAX)
    with pytest.raises(ValueError, match="tenants"):
        TenantPredictors(make).recall({str(i): {} for i in range(TENANTS_MAX + 1)})


def test_without_tenants_it_is_one_model() -> None:
    """Traces name no tenants."""
    one, many = Markov(), TenantPredictors(lambda share: Markov(share=share))
    for run in ("abc", "abd", "ca"):
        learn(one, list(run))
        learn(many, list(run))
    for path in (["a"], ["a", "b"], ["x"]):
        assert many.forecast(path) == one.forecast(path)
