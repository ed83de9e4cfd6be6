"""`towerctl lab scale`, and the sessions that it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.scale.sessions import RecordedSession, kept_samples, learn
from towerd.cli.main import towerctl


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve conversations of three turns behind a block that all share; the last one loses a block in its third."""
    lines: list[dict[str, Any]] = []
    for who in range(12):
        mine = [100 * (who + 1) + i for i in range(9)]
        for turn, n in enumerate((2, 4, 6)):
            ids = [1, *mine[: n - 1]]
            if who == 11 and turn == 2:
                ids = [1, *mine[:2], 7000, 7001, 7002]
            at_ms = 1000 * (who + 20 * turn)
            lines.append({"timestamp": at_ms, "input_length": 512 * n, "output_length": 9, "hash_ids": ids})  # fmt: skip
    path = tmp_path / "talk.jsonl"
    lines.sort(key=lambda line: line["timestamp"])
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def run(*args: object) -> list[dict[str, Any]]:
    result = CliRunner().invoke(towerctl, ["lab", "scale", *map(str, args), "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_sessions_are_read_off_a_trace(trace: Path) -> None:
    sample = learn(trace, 12)
    assert (sample.n_sessions, sample.n_turns) == (12, 36)
    assert sample.weight == 1
    usual = RecordedSession(0, 512, (1024, 2048, 3072), (0, 0, 0), (0, 20, 20))
    loses = RecordedSession(0, 512, (1024, 2048, 3072), (0, 0, 512), (0, 20, 20))
    assert sample.shapes.count(usual) == 11
    assert sample.shapes.count(loses) == 1
    few = learn(trace, 2)
    assert len(few.shapes) == 2
    assert few.n_sessions == 12


def test_what_was_learned_is_written(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    assert run("--traces", trace, "--save", path) == []
    assert kept_samples(path) == [learn(trace)]


def test_rows_for_each_number_of_sessions(trace: Path) -> None:
    rows = run("--traces", trace, "--sessions", "1e3,1e9", "--machine", "1b-cpu")
    assert [row["sessions"] for row in rows] == [1000, 10**9]
    assert rows[0]["objects"] == sum(rows[0]["objects_by_kind"].values())
    assert rows[0]["put"] == rows[0]["objects"]
    assert 0.9e6 < rows[1]["put"] / rows[0]["put"] < 1.1e6
    assert any("partition" in each for each in rows[1]["breaks"])


def test_check_compares_with_the_real_code(trace: Path) -> None:
    (row,) = run("--traces", trace, "--check", 12)
    assert row["equal"] is True
    assert row["put"] > 12


def test_break_even_of_the_kept_sessions(trace: Path) -> None:
    rows = run("--traces", trace, "--break-even")
    assert len(rows) == 10
    cheap, dear = (
        next(row for row in rows if row["machine"] == name and row["store"] == "S3 Standard")
        for name in ("1B on 2 cores", "8B on an H100")
    )
    assert cheap["fetches_a_month"] < 1 < dear["fetches_a_month"]


def test_kept_sessions_are_of_two_traces() -> None:
    assert [sample.trace for sample in kept_samples()] == ["mooncake_conversation", "coding"]
    assert all(0.8 < sample.weight < 1.25 for sample in kept_samples())


@pytest.mark.parametrize("sessions", ["few", "0", "1e99", "nan"])
def test_a_number_that_is_none(trace: Path, sessions: str) -> None:
    args = ["lab", "scale", "--traces", str(trace), "--sessions", sessions]
    result = CliRunner().invoke(towerctl, args)
    assert result.exit_code == 2
    assert "is not numbers from 1 to 1e12" in result.output
