"""States of a served model: the projection, the transcripts, and that what they tell is found."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from lab.bench.policy.states import EvaluatedRuns, compare, evaluated, of_others
from lab.bench.policy.transcripts import StepStates, TranscriptReader, transcripts
from lab.predict.runs import FinishedRun
from lab.predict.states import N_STATE, LogitProjection, unit
from towerd.models.bundled import bundled_model


def test_angles_survive_the_projection() -> None:
    """Logits are a linear map of a hidden state; a constant added to all of them says nothing."""
    rng = np.random.default_rng(0)
    head = rng.normal(size=(8000, 64)).astype(np.float32)
    hidden = rng.normal(size=(60, 64)).astype(np.float32)
    hidden[1] = hidden[0] + 0.1 * hidden[2]
    logits = hidden @ head.T
    project = LogitProjection(8000)
    states = np.stack([project.state(row) for row in logits])
    assert states.shape == (60, N_STATE)
    assert np.allclose(np.linalg.norm(states, axis=1), 1)
    off = states @ states.T - unit(hidden) @ unit(hidden).T
    assert np.sqrt((off**2).mean()) < 0.2
    assert float(states[0] @ states[1]) > 0.97
    assert np.allclose(LogitProjection(8000).state(logits[5] + 7), states[5], atol=1e-4)
    assert not project.state(np.full(8000, 3.0, np.float32)).any()


def written(path: Path) -> Path:
    steps = [
        {"agent": "user", "action": "ask", "text": "the cat " * 90},
        {"agent": "planner", "action": "plan", "text": "a red ball"},
        {"agent": "tool:x", "action": "result", "text": "and ran"},
        {"agent": "coder", "action": "code", "text": ""},
    ]
    rows = [
        {"workflow_id": f"w{i}", "app": "a", "steps": steps[: 2 + i], "meta": {"task_id": i}}
        for i in range(3)
    ]
    rows.insert(1, {"workflow_id": "none", "app": "a", "steps": steps[:1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_state_is_that_of_the_text_before_it(tmp_path: Path) -> None:
    """What is evaluated in one go equals every beginning evaluated by itself."""
    path = written(tmp_path / "w.jsonl")
    pairs = list(transcripts(path))
    assert [run.steps for run, _ in pairs] == [("planner",)] * 2 + [("planner", "coder")]
    run, said = pairs[-1]
    assert len(said[0].text) < 300
    reader = TranscriptReader(bundled_model())
    try:
        whole, first = reader.states(said), reader.states(said[:2])
        n = reader.n_tokens
        kept = evaluated(path, reader, 10, tmp_path)
        again = evaluated(path, reader, 10, tmp_path)
        assert reader.n_tokens > n
    finally:
        reader.close()
    assert whole.prompt.shape == whole.answer.shape == (2, N_STATE)
    assert np.allclose(whole.prompt[0], first.prompt[0], atol=1e-3)
    assert np.allclose(whole.answer[0], first.answer[0], atol=1e-3)
    assert float(whole.prompt[1] @ whole.answer[1]) > 0.999  # an agent that said nothing
    assert float(whole.prompt[0] @ whole.answer[0]) < 0.99
    assert [each.steps for each in kept.runs] == [run.steps for run, _ in pairs]
    for one, other in zip(kept.states, again.states, strict=True):
        assert np.array_equal(one.prompt, other.prompt)


def planted(n: int, seed: int, agents: str) -> EvaluatedRuns:
    """The prompt's state of a step is near a direction of the agent that acts after it."""
    chance = random.Random(seed)
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(99).normal(size=(27, N_STATE))
    runs, states = [], []
    for i in range(n):
        steps = [chance.choice(agents) for _ in range(6)]
        after = [ord(name) - 96 for name in steps[1:]] + [0]
        prompt = directions[after] + rng.normal(size=(6, N_STATE)) * 0.7 + 3.0
        runs.append(FinishedRun(tuple(steps), group=f"{agents} {i}"))
        noise = rng.normal(size=(6, N_STATE))
        states.append(StepStates(unit(prompt.astype(np.float32)), unit(noise.astype(np.float32))))
    return EvaluatedRuns(runs, states)


def test_what_states_tell_is_found_and_noise_is_not() -> None:
    pytest.importorskip("torch")
    rows = compare(planted(60, 0, "abc"), parts=1, graphs=True)
    assert rows["mixture, prompt - names"]["s1"] > 0.25
    assert rows["graph, prompt"]["s1"] > rows["graph, names"]["s1"] + 0.2
    assert rows["mixture, prompt"]["log_loss"] < rows["markov1"]["log_loss"] - 0.2
    lead = rows["mixture, answer - names"]
    assert abs(lead["s1"]) < 0.1 + 2 * lead["s1_error"]


def test_names_of_another_source_are_unknown() -> None:
    """Whatever is known of the others' steps, none of these names was ever seen."""
    pytest.importorskip("torch")
    rows = of_others({"one": planted(30, 0, "abc"), "two": planted(20, 1, "xyz")}, "two")
    trained = [
        row for name, row in rows.items() if name != "markov3, learning"
    ]  # which meets them in the test
    assert all(row["s1"] < 0.3 for row in trained)
    assert rows["mixture, prompt"]["log_loss"] < rows["markov3"]["log_loss"]
