"""What policies learned survives a restart, is bounded, and damage to it costs nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import Planted
from seams import hot_policy
from store_tools import ROW_IDENTITY

from lab.predict.runs import FinishedRun
from lab.predict.train_mixture import save, train_mixture
from towerd.errors import ConfigError
from towerd.policy import make_policy
from towerd.policy.base import Learning
from towerd.policy.predict.base import END, N_STEPS
from towerd.policy.predict.markov import CONTEXTS_KEPT, Markov, learn
from towerd.policy.predict.mixture import Trained
from towerd.policy.predict.steps import PARTS
from towerd.store import Store
from towerd.tiers.ranking import BYTES_MAX, META_KEY, Ranking, pack, unpack


def a_day(name: str) -> Any:
    """Tools return in seconds, people in minutes; two agents take turns."""
    tree = Planted()
    policy: Any = make_policy(name, tree)
    now = 0.0
    for key in range(0, 800, 4):
        for start, gap_s, stop in ((key, 2.0, "tool_use"), (key + 2, 200.0, "end_turn")):
            policy.insert(start, 10, now)
            policy.stepped(start, now, "w", stop)
            policy.answered(start, now + 0.5, stop)
            now += gap_s
            tree.above[start + 1] = start
            policy.insert(start + 1, 10, now)
            now += 1.0
    return policy


@pytest.mark.parametrize("name", ["foresight", "pbkv"])
def test_resumes_where_it_stopped(name: str) -> None:
    """Another policy that recalls what one learned predicts the same."""
    old: Any = a_day(name)
    new: Any = make_policy(name, Planted())
    assert all(isinstance(each, Learning) for each in (old, new))
    new.recall(json.loads(json.dumps(old.learned())))
    path = ["tool_use", "end_turn", "tool_use"]
    assert old.predictor.forecast(path) == new.predictor.forecast(path) != ()
    if name == "foresight":
        assert new.visits.stops == ["tool_use", "end_turn"]
        for policy in (old, new):
            policy.insert(9001, 10, 1e6)
            policy.answered(9001, 1e6 + 1, "tool_use")
        index = [
            p.visits.index(p.visits.away.get(9001) or p.visits.current, 1e6 + 2) for p in (old, new)
        ]
        assert index[0] == pytest.approx(index[1], rel=1e-3)
        assert index[1] > 0.0


POLICIES = ("foresight", "pbkv")


def test_the_catalog_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both tiers' policies; a text that is damaged, another policy's or no text is ignored."""
    store = Store.open(tmp_path / "store", ROW_IDENTITY)
    with Store.open(tmp_path / "empty", ROW_IDENTITY) as empty:
        unlearned = {each: Ranking(each, empty, lambda: 0.0).learned() for each in POLICIES}

    def opened(policy: str) -> Ranking:
        return Ranking(policy, store, lambda: 0.0)

    with hot_policy(lambda tree: a_day("foresight")):
        learned = opened("foresight")
    learned.keep(now=False)
    assert store.get_meta(META_KEY) is None, "not every moment"
    learned.keep(now=True)
    text = store.get_meta(META_KEY)
    assert text is not None
    assert len(text) < BYTES_MAX
    assert opened("foresight").learned() == text
    visits = {"stops": [], "mean_nbytes": -1.0, "returns": {}}
    with caplog.at_level(logging.WARNING):
        for policy, damaged in (
            ("foresight", text[:-7]),
            ("foresight", ""),
            ("foresight", "\x00é"),
            ("pbkv", text),
            ("foresight", pack("foresight", {"hot": {}, "warm": []}) or ""),
            ("foresight", pack("foresight", {"hot": {"steps": {}, "visits": visits}}) or ""),
        ):
            store.set_meta(META_KEY, damaged)
            caplog.clear()
            fresh = opened(policy)
            assert "lost" in caplog.text
            assert fresh.learned() == unlearned[policy]
    lru = opened("lru")
    lru.keep(now=True)
    assert lru.learned() is None
    assert store.get_meta(META_KEY) == damaged
    store.close()


@given(st.data())
def test_no_changed_text_is_believed(data: st.DataObject) -> None:
    text = pack("foresight", {"hot": {"a": 1}}) or ""
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]))
    try:
        found = unpack("foresight", text[:at] + other + text[at + 1 :])
    except ValueError:
        return
    assert found == {"hot": {"a": 1}}, "the last digit may stand for the same bytes"


def test_no_more_than_a_megabyte() -> None:
    noise = np.random.default_rng(0).bytes(BYTES_MAX).hex()
    assert pack("x", {"noise": noise}) is None


def test_markov_keeps_what_was_used_last() -> None:
    markov = Markov(1)
    for i in range(CONTEXTS_KEPT):
        learn(markov, [f"old {i}", "then"])
    learn(markov, ["a", "b"])
    kept = markov.learned()
    assert len(kept["contexts"]) == CONTEXTS_KEPT
    new = Markov(1)
    new.recall(kept)
    assert new.forecast(["a"])[0]["b"] == markov.forecast(["a"])[0]["b"]


def test_names_that_clients_choose_do_not_push_out_the_rest() -> None:
    """However long and strange they are, all that was learned fits the catalog's text."""
    chance = np.random.default_rng(3)
    old: Any = a_day("foresight")
    for step in range(1500):
        name = "".join(map(chr, chance.integers(0x4E00, 0x9F00, 128)))
        old.stepped(3, 1e5 + step, f"flood {step // 3}", "tenant\n" + name)
        if step % 3 == 2:
            old.workflow_ended(f"flood {step // 3}", 1e5 + step)
    learned = old.learned()
    assert learned["steps"]["tenant"]["Markov"]["contexts"]
    text = pack("foresight", {"hot": learned, "warm": learned})
    assert text is not None
    new: Any = make_policy("foresight", Planted())
    new.recall(unpack("foresight", text)["hot"])
    assert new.visits.model.learned()


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: d | {"order": 7},
        lambda d: d | {"contexts": [[1, ["a"], {"b": -1}]]},
        lambda d: d | {"contexts": [[N_STEPS + 1, ["a"], {"b": 1}]]},
        lambda d: d | {"contexts": [[1, ["a"] * 9, {"b": 1}]]},
        lambda d: {},
        lambda d: d | {"contexts": 3},
    ],
)
def test_markov_damaged(harm: Callable[[dict[str, Any]], Any]) -> None:
    markov = Markov()
    learn(markov, ["a", "b"])
    before = markov.forecast(["a"])
    with pytest.raises((ValueError, KeyError, TypeError)):
        markov.recall(harm(dict(markov.learned())))
    assert markov.forecast(["a"]) == before


def test_a_trained_predictor_leads_while_it_is_right(tmp_path: Path) -> None:
    """Names belong to the tenant that is asked about; when what it says stops coming true, counts
    take over."""
    weights = train_mixture([FinishedRun(("code",)), *[FinishedRun(("plan",) * 20)] * 9], None)
    alone = np.zeros_like(weights.weights)
    alone[..., PARTS.index("markov1")] = 1.0  # which does not copy what it sees
    path = tmp_path / "p.npz"
    save(replace(weights, weights=alone), path)
    policy: Any = make_policy("pbkv", Planted(), path)
    predictor = policy.predictor
    of_tenant = predictor.of("tenant")
    assert isinstance(of_tenant.leader, Trained)
    said = predictor.forecast(["tenant\nplan"])[0]
    assert set(said) == {"tenant\ncode", "tenant\nplan", END}
    assert said["tenant\nplan"] > 0.8
    for i in range(600):
        policy.stepped(1, float(i), "w", "tenant\ncode")
    assert isinstance(of_tenant.leader, Markov)
    assert predictor.forecast(["tenant\ncode"])[0]["tenant\ncode"] > 0.9


def test_predictors_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="uses no predictor"):
        make_policy("lru", Planted(), tmp_path / "p.npz")
    with pytest.raises(ConfigError, match="is not a predictor"):
        make_policy("foresight", Planted(), tmp_path / "missing.npz")
