"""Recording: a replay has the same requests, and their texts cannot be read from the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.replay.load import load
from lab.replay.simulate import replay
from lab.replay.trace import TraceError
from towerd.errors import ConfigError
from towerd.policy import make_policy
from towerd.sessions.trace_recorder import TraceRecorder
from towerd.store import Turn


@pytest.fixture
def meta() -> dict[str, str]:
    """What a store keeps for other modules."""
    return {}


def record(path: Path, meta: dict[str, str], turns: list[Turn], block: int = 4) -> Path:
    trace = TraceRecorder.open(path, meta.get, meta.__setitem__, 1000.0, block)
    for turn in turns:
        trace.add(turn, turn.session or "?", turn.started_s + 2.0)
    trace.close()
    return path


def turn(session: str, ids: list[int], t: float, **values: Any) -> Turn:
    return Turn(
        "local",
        session,
        np.array(ids, np.int32),
        np.zeros(3, np.int32),
        len(ids),
        1000.0 + t,
        **({"stop": "tool_use"} | values),
    )


def test_a_recorded_trace_replays(tmp_path: Path, meta: dict[str, str]) -> None:
    """Blocks are shared as far as beginnings are equal, whoever asks; partial blocks are left
    out; calls come in the order of arrival, with what is known of them."""
    base = list(range(8))
    turns = [
        turn("a", [*base, 50, 51, 52, 53, 54], 1.0, agent="planner"),
        turn("b", [*base, 60, 61, 62, 63], 9.0),
        turn("a", [*base, 50, 51, 52, 53, 54, 55, 56, 57, 58], 5.0, agent="planner"),
        turn("c", [1], 12.0),
        turn("a", [*base, 70, 71, 72, 73], 20.0, stop="end_turn", workflow="w"),
    ]
    trace = load(record(tmp_path / "t", meta, turns), 4)
    assert [call.time_s for call in trace.calls] == [1.0, 5.0, 9.0, 12.0, 20.0]
    depths = [sum(trace.n_blocks[s] for s in call.path) for call in trace.calls]
    assert depths == [3, 4, 3, 1, 3]
    assert [call.n_tokens for call in trace.calls] == [13, 17, 12, 1, 12]
    assert len({call.path[0] for call in trace.calls}) == 2
    assert len({call.path[1] for call in trace.calls if len(call.path) > 1}) == 1
    assert [call.stop for call in trace.calls] == ["tool_use"] * 4 + ["end_turn"]
    assert [call.service_s for call in trace.calls] == [2.0] * 5
    agents = [call.agent for call in trace.calls]
    assert agents[0] == agents[1] != "" == agents[2]
    assert [call.session for call in trace.calls][0] == trace.calls[1].session
    outcome = replay(trace, make_policy("lru", trace), 100)
    assert outcome.hits == [0, 3, 2, 0, 2]


def test_nothing_can_be_read(tmp_path: Path, meta: dict[str, str]) -> None:
    """No token, no name; two files of the same traffic have no id in common; the secret is in
    neither."""
    turns = [turn("my session", [123456, 7, 8, 9], 1.0, agent="my agent", workflow="my flow")]
    one = record(tmp_path / "one", meta, turns).read_text()
    two = record(tmp_path / "two", meta, turns).read_text()
    for word in ("123456", "my", "agent x", *meta.values()):
        assert word not in one.replace('"agent"', "").replace('"workflow"', "")
    ids = [json.loads(text.splitlines()[1])["new"] for text in (one, two)]
    assert not set(ids[0]) & set(ids[1])
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600


def test_tenants_do_not_meet(tmp_path: Path, meta: dict[str, str]) -> None:
    other = Turn("b", "a", np.arange(8, dtype=np.int32), np.zeros(1, np.int32), 8, 1009.0)
    trace = load(record(tmp_path / "t", meta, [turn("a", list(range(8)), 1.0), other]), 4)
    assert not set(trace.calls[0].path) & set(trace.calls[1].path)
    assert trace.calls[0].session != trace.calls[1].session


def test_recording_continues_after_a_restart(tmp_path: Path, meta: dict[str, str]) -> None:
    """Same secret, same ids; a line that was cut off by a crash is dropped."""
    path = record(tmp_path / "t", meta, [turn("a", list(range(8)), 1.0)])
    with path.open("ab") as file:
        file.write(b'{"t": 3, "s": "tor')
    record(path, meta, [turn("a", list(range(12)), 7.0)])
    trace = load(path, 4)
    assert trace.calls[1].path[:2] == trace.calls[0].path
    assert len(trace.calls) == 2


def test_files_that_cannot_be_continued(tmp_path: Path, meta: dict[str, str]) -> None:
    path = record(tmp_path / "t", meta, [turn("a", [1], 1.0)])
    with pytest.raises(ConfigError, match="by another store"):
        TraceRecorder.open(path, lambda name: None, meta.__setitem__, 0.0)
    before = path.read_bytes()
    assert path.read_bytes() == before
    notes = tmp_path / "notes"
    notes.write_text("dear diary\n")
    with pytest.raises(ConfigError, match="not a trace"):
        TraceRecorder.open(notes, meta.get, meta.__setitem__, 0.0)
    assert notes.read_text() == "dear diary\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        TraceRecorder.open(tmp_path / "no" / "where", meta.get, meta.__setitem__, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": 5}, "more than the session had"),
        ({"in": 99}, "do not make up"),
        ({"in": None}, "'in'"),
        ({"t": -1.0}, "'t'"),
        ({"new": "x"}, "'new'"),
        ({"s": 3}, "'s'"),
    ],
)
def test_damaged_lines(
    tmp_path: Path, meta: dict[str, str], change: dict[str, Any], message: str
) -> None:
    path = record(tmp_path / "t", meta, [turn("a", list(range(8)), 1.0)])
    head, line = path.read_text().splitlines()
    path.write_text(head + "\n" + json.dumps(json.loads(line) | change) + "\n")
    with pytest.raises(TraceError, match=message):
        load(path, 4)
