"""`towerctl bench volatile`: its sessions and changes, and the arithmetic of what is served."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest

from lab.bench.volatile import changes, prompts, served
from lab.bench.volatile.divergence import ReplyDrift, kl_nats, mean_excess
from lab.bench.volatile.prompts import AgentPrompt, AgentTurn
from lab.bench.volatile.served import LOAD, QUICK, Served, VolatileLoad
from towerd.cli.bench.harness.client import Completion


def built(seed: int, load: VolatileLoad = QUICK, *, reminder: bool = False) -> AgentPrompt:
    whole = prompts.session(seed, load.shape, reminder=reminder)
    return replace(whole, turns=whole.turns[: load.shape.turns_built])


def text_of(prompt: AgentPrompt) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in prompt.messages())


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("load", [LOAD, QUICK])
def test_sessions_are_the_same_every_time_and_differ(load: VolatileLoad) -> None:
    texts = [text_of(built(seed, load)) for seed in range(4)]
    assert texts == [text_of(built(seed, load)) for seed in range(4)]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("load", [LOAD, QUICK])
def test_users_and_assistants_take_turns_in_every_prompt(load: VolatileLoad) -> None:
    """So that every template renders it, and a request is never answered twice."""
    for seed, kinds in enumerate(load.sessions):
        whole = prompts.session(seed, load.shape, reminder="reminder" in kinds)
        for _, prompt in served.changing(whole, load.shape.turns_built, kinds, seed):
            roles = [message["role"] for message in prompt.messages()]
            assert roles[0] == "system"
            assert roles[1:] == ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]


@pytest.mark.parametrize("load", [LOAD, QUICK])
def test_each_session_ends_with_its_only_bad_change(load: VolatileLoad) -> None:
    """Behind it nothing that follows could be good."""
    for kinds in load.sessions:
        assert [kind in changes.BAD for kind in kinds] == [False] * (len(kinds) - 1) + [True]
        assert "reminder" not in kinds[1:]
    met = {kind for kinds in load.sessions for kind in kinds}
    assert met == set(changes.CHANGES) if load is LOAD else met >= set(changes.BAD)


def test_requests_of_a_session_grow() -> None:
    """Each begins with the turns of the one before, and an agent waits for a reply at its end."""
    prompt = built(0)
    asked = list(prompts.requests_of(prompt))
    assert asked[-1] == prompt
    for before, after in zip(asked, asked[1:], strict=False):
        assert after.turns[: len(before.turns)] == before.turns
        assert after.turns[-1].role != "assistant"


@pytest.mark.parametrize("kind", changes.CHANGES)
@pytest.mark.parametrize("seed", range(4))
def test_a_change_leaves_most_of_what_follows(kind: str, seed: int) -> None:
    """The prompt differs early or in the middle, and its last turns are there, in order."""
    before = built(seed, reminder=kind == "reminder")
    after = changes.CHANGES[kind](before, rng())
    assert after == changes.CHANGES[kind](before, rng())
    old, new = text_of(before), text_of(after)
    assert old != new
    assert after.turns[-3:] == before.turns[-3:]
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in blocks if block.size > 200) > 0.4 * len(new)


def test_what_changes_is_what_the_name_says() -> None:
    before = built(1, LOAD, reminder=True)
    after = {name: change(before, rng()) for name, change in changes.CHANGES.items()}
    (found,) = difference(before, after["date"])
    assert found == "environment"
    assert len(after["date"].environment) == len(before.environment)
    assert len(after["environment"].environment) > len(before.environment)
    assert text_of(after["session_id"]).splitlines()[1:] == text_of(before).splitlines()[1:]
    assert len(after["memory"].memory) == len(before.memory) + 2
    assert len(after["tool_added"].tools) == len(before.tools) + 1
    assert sum(a != b for a, b in zip(after["rule"].rules, before.rules, strict=True)) == 1
    kept = after["oldest_dropped"].turns
    assert kept == before.turns[-len(kept) :]
    assert difference(before, after["compaction"]) == difference(before, after["unrelated"])
    assert len(after["unrelated"].turns) == len(before.turns)
    assert difference(before, after["shared_words"]) == ["memory"]


def difference(a: AgentPrompt, b: AgentPrompt) -> list[str]:
    names = [field.name for field in fields(AgentPrompt)]
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def test_a_reminder_stands_in_the_last_message_of_a_person() -> None:
    """A later one has it alone."""
    whole = prompts.session(0, QUICK.shape, reminder=True)
    n = QUICK.shape.turns_built
    for n_turns in (n, n + 2):
        messages = replace(whole, turns=whole.turns[:n_turns]).messages()[1:]
        marked = [i for i, m in enumerate(messages) if "<system-reminder>" in m["content"]]
        asked = [i for i in range(n_turns) if whole.turns[i].role == "user"]
        assert marked == asked[-1:]


def test_swapped_tools_keep_names() -> None:
    before = built(2)
    after = changes.swapped_tools(before, rng())
    for old, new in zip(before.tools, after.tools, strict=True):
        assert old["function"]["name"] == new["function"]["name"]
        assert old["function"]["description"] != new["function"]["description"]
        assert old["function"]["parameters"] != new["function"]["parameters"]


@pytest.mark.parametrize("seed", range(4))
def test_shared_words_are_those_of_the_history(seed: int) -> None:
    """As long as what was there, in the history's words and names."""
    before = built(seed)
    after = changes.shared_words(before, rng())
    said = "\n".join(turn.text for turn in before.turns)
    names, known = (set(re.findall(r"`(\w+)`", each)) for each in ("\n".join(after.memory), said))
    assert names <= known
    n_old, n_new = (len("\n".join(each.memory)) for each in (before, after))
    assert n_old <= n_new < 1.5 * n_old


def test_a_tool_result_is_written_in_the_role_of_the_user() -> None:
    prompt = replace(built(0), turns=(AgentTurn("user", "a"), AgentTurn("tool", "b")), reminder="")
    assert prompt.messages()[1:] == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "<tool_response>\nb\n</tool_response>"},
    ]


def logs(**tokens: float) -> dict[int, float]:
    return {int(name[1:]): math.log(p) for name, p in tokens.items()}


def test_divergence_of_known_distributions() -> None:
    p, q = logs(t1=0.5, t2=0.3), logs(t1=0.4, t2=0.4)
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(1)
    assert kl_nats(p, q) == pytest.approx(expected)
    assert kl_nats(p, p) == 0


def test_tokens_that_only_one_names_are_in_the_rest() -> None:
    """What is left is a divergence of the same distributions with fewer tokens told apart: less, never
    more."""
    p, q = logs(t1=0.5, t2=0.3), logs(t1=0.5, t3=0.4)
    assert kl_nats(p, q) == pytest.approx(0)
    assert kl_nats(logs(t1=0.9), logs(t1=0.1)) == pytest.approx(
        0.9 * math.log(9) + 0.1 * math.log(0.1 / 0.9)
    )


def test_divergence_is_finite_without_a_rest() -> None:
    """Rounded probabilities can add up to one, or to a little more."""
    p, q = logs(t1=0.7, t2=0.3 + 1e-9), logs(t1=0.6, t2=0.3)
    assert 0 < kl_nats(p, q) < 2
    assert 0 < kl_nats(q, p) < 2
    assert kl_nats(logs(t1=1.0), logs(t2=1.0)) == pytest.approx(0)


@pytest.mark.parametrize("seed", range(5))
def test_divergence_is_at_most_that_of_the_vocabulary(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = (random.dirichlet(np.full(500, 0.05)) + 1e-12 for _ in range(2))
    whole = float((p * np.log(p / q)).sum())
    tops = [{int(i): math.log(x[i]) for i in np.argsort(-x)[:100]} for x in (p, q)]
    assert 0 <= kl_nats(tops[0], tops[1]) <= whole * (1 + 1e-6)


def test_excess_is_over_the_noise() -> None:
    exact, near, other = [logs(t1=0.5)] * 2, [logs(t1=0.4)] * 2, [logs(t1=0.45), logs(t1=0.5)]
    drift = ReplyDrift.of(exact, near, other)
    excess = mean_excess([drift])
    assert excess == pytest.approx(np.mean(drift.served) - np.mean(drift.noise))
    assert drift.noise[1] == 0 < drift.noise[0] < drift.served[0]
    longer = ReplyDrift([0.0] * 6, [0.0] * 6)
    assert mean_excess([drift, longer]) == pytest.approx(excess / 4)
    assert mean_excess([]) == 0
    with pytest.raises(ValueError, match="shorter"):
        ReplyDrift.of(exact, near, other[:1])


def completion(evaluated: int, ttft_s: float, **reuse: Any) -> Completion:
    final = {"timings": {"prompt_n": evaluated}, "towerd": {"reuse": reuse}}
    return Completion(ttft_s=ttft_s, final=final)


def test_figures_of_requests() -> None:
    """Ratios are of the good changes; cut is what had rows refused; keys that a daemon does not send are 0."""
    drift = ReplyDrift([0.003, 0.005], [0.002, 0.002])
    slow, rival = completion(1000, 4.0), completion(500, 3.0)
    requests = [
        Served("date", 1100, completion(200, 1.0, moved=800, checked=80), slow, rival, drift),
        Served("rule", 1100, completion(300, 1.0), slow, rival, drift),
        Served("unrelated", 1100, completion(1000, 4.0, refused=64), slow, rival, drift),
    ]
    found = served.figures(requests)
    assert found["evaluated_ratio"] == pytest.approx(2000 / 500)
    assert found["evaluated_ratio_all"] == pytest.approx(3000 / 1500)
    assert found["ttft_ratio"] == found["ttft_ratio_p50"] == pytest.approx(4)
    assert found["vs_cache_reuse_ttft"] == pytest.approx(3)
    assert found["kl_noise"] == pytest.approx(0.002)
    assert found["kl_excess"] == found["kl_excess_p99_request"] == pytest.approx(0.002)
    assert (found["refused_bad"], found["refused_good"]) == (1, 0)
    line = served.line("date", requests)
    assert (line["moved"], line["checked"], line["refused"]) == (800, 80, 0)
    assert line["told_excess"] is None
    json.dumps([found, line])


def test_what_towerd_tells_of_its_drift() -> None:
    near = completion(1, 1.0)
    near.final["towerd"]["drift"] = {"kl": 0.005, "floor_kl": 0.003}
    told = Served("date", 9, near, near, near, ReplyDrift([0.0], [0.0]))
    assert told.told_excess == pytest.approx(0.002)
    near.final["towerd"]["drift"] = {"kl": None, "floor_kl": None}
    assert told.told_excess is None
