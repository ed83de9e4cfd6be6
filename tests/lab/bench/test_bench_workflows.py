"""`bench workflows`: its load, its figures, and that its daemon can run the laboratory's policies."""

from __future__ import annotations

from collections import Counter
from statistics import mean

import pytest

from lab.bench.workflows.cells import chosen
from lab.bench.workflows.client import ServedStep, ServedWorkflow
from lab.bench.workflows.latency import LOAD, QUICK
from lab.bench.workflows.load import Transcript, WorkflowLoad, distinct_tokens, walks
from lab.bench.workflows.report import CellOutcome, figures, ratio
from lab.policies.told import Liar, Oracle
from towerd.policy.predict.base import END

WORDS = tuple(f"w{n}" for n in range(5000))


@pytest.mark.parametrize("load", [LOAD, QUICK])
def test_workflows_are_the_same_every_time_and_dynamic(load: WorkflowLoad) -> None:
    found = walks(load, WORDS, 3)
    assert [w.agents for w in found] == [w.agents for w in walks(load, WORDS, 3)]
    assert [w.agents for w in found] != [w.agents for w in walks(load, WORDS, 4)]
    n = sum(len(walk.steps) for walk in found)
    assert n - len(found[-1].steps) < load.requests <= n
    assert not found[0].is_measured
    assert found[-1].is_measured
    pairs = Counter(p for w in found for p in zip(w.agents, w.agents[1:], strict=False))
    assert any(a == b for a, b in pairs), "no agent ever acts again"
    after = Counter(a for a, _ in pairs)
    assert max(after.values()) > 2, "every step is certain"


def test_distinct_tokens_are_those_of_all_prompts_and_answers() -> None:
    """Counted again from what the agents are sent, one token a word."""
    load = WorkflowLoad(requests=60, warm_requests=20)
    found, prefixes = walks(load, WORDS, 1), set()
    for walk in found:
        said = Transcript([(None, walk.task)])
        for n, step in enumerate(walk.steps):
            reply = " ".join(f"{walk.name}-{n}-{i}" for i in range(load.reply_tokens))
            words: list[str] = []
            said.lines.append((step.agent, reply))
            for message in said.messages(walk.app, step.agent):
                words += message["content"].split()
            prefixes |= {hash(tuple(words[:k])) for k in range(1, len(words) + 1)}
            said.lines.append((None, step.result))
    assert distinct_tokens(load, found, 0.0) == pytest.approx(len(prefixes), rel=0.01)


def _outcome(ttft_s: list[float]) -> CellOutcome:
    steps = [
        ServedStep(t, 2 * t, 100, 50, missed)
        for t, missed in zip(ttft_s, (True, None, False), strict=True)
    ]
    return CellOutcome([ServedWorkflow(f"w{n}", n > 0, 1.0, steps) for n in range(5)], 0.5)


def test_figures_and_ratios() -> None:
    slow, fast = _outcome([0.3, 0.4, 0.5]), _outcome([0.1, 0.2, 0.3])
    found = figures([slow, slow])
    assert found["ttft_p50_s"] == 0.4
    assert found["hit_rate"] == found["base_miss"] == 0.5
    value, low, high = ratio([slow, slow], [fast, fast], mean)
    assert value == pytest.approx(2.0)
    assert low <= value <= high


def test_the_oracle_is_right_and_the_liar_wrong() -> None:
    oracle = Oracle({"w": ("a", "b")})
    oracle.workflow = "tenant\nw"
    assert list(oracle.forecast(["tenant\na"])) == [{"tenant\nb": 1.0}, {END: 1.0}, {END: 1.0}]
    oracle.workflow = "tenant\nother"
    assert not oracle.forecast(["tenant\na"])
    liar = Liar()
    for _ in range(9):
        for n in range(1, 4):
            liar.observe(["a", "b", END][:n])
    said = liar.forecast(["a"])[0]
    assert min(said, key=lambda name: said[name]) == "b"


def test_cells_are_run_once_each() -> None:
    compared, cells = chosen((), (0.1, 0.3), (4, 16), quick=False)
    assert len(set(cells)) == len(cells)
    assert {*compared.cells()} <= {*cells}
    assert {cell.policy for cell in cells} >= {"lru", "lifecycle", "hierarchy", "pbkv", "foresight"}
