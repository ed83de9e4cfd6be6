"""`towerctl lab replay` on small traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from towerd.cli.main import towerctl

_FORMAT = "agentic-coding-trace/1"


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """Six conversations of five turns, one after the other in turns."""
    lines = []
    for turn in range(5):
        for who in range(6):
            ids = [100 * who + i for i in range(2 * turn + 2)]
            at_ms = 1000 * (6 * turn + who)
            lines.append(
                {
                    "timestamp": at_ms,
                    "input_length": 512 * len(ids),
                    "output_length": 9,
                    "hash_ids": ids,
                }
            )
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_rows(chat: Path) -> None:
    """A row per capacity and policy, LRU and the bound always among them."""
    result = CliRunner().invoke(
        towerctl,
        [
            "lab",
            "replay",
            str(chat),
            "--policy",
            "sieve,foresight",
            "--capacity",
            "50%,1.0",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["policy"] for row in rows] == 2 * ["lru", "sieve", "foresight", "belady"]
    assert [row["capacity_blocks"] for row in rows] == 4 * [30] + 4 * [60]
    assert all(row["hit_rate"] <= rows[3]["hit_rate"] for row in rows[:3])
    n_tokens = 512 * 6 * (2 + 4 + 6 + 8 + 10)
    best = 512 * 6 * (2 + 4 + 6 + 8) / n_tokens
    assert [row["hit_rate"] for row in rows[4:]] == pytest.approx([best] * 4)
    assert rows[4]["gap_closed"] is None
    assert rows[4]["prefilled_tokens"] == 512 * 60
    assert rows[4]["bytes_moved"] == 512 * 60 * 32768


def test_table(chat: Path) -> None:
    result = CliRunner().invoke(
        towerctl, ["lab", "replay", str(chat), "--capacity", "20%", "--ends"]
    )
    assert result.exit_code == 0, result.output
    assert "belady" in result.output
    assert "foresight" in result.output


def test_sessions_are_interleaved(tmp_path: Path) -> None:
    """A trace of single sessions is served to several users at once."""
    request = {"t": 0.0, "in": 128, "h": [0, 1, 2]}
    sessions = [
        {"block_size": 64, "requests": [request, {"t": 9.0, "in": 192, "h": [2, 3, 1]}]}
        for _ in range(4)
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"format": _FORMAT, "sessions": sessions}))
    for source in (path, tmp_path):
        result = CliRunner().invoke(
            towerctl, ["lab", "replay", str(source), "--capacity", "100%", "--users", "2", "--json"]
        )
        assert result.exit_code == 0, result.output
        row = json.loads(result.output.splitlines()[0])
        assert row["trace"] == "coding-2"
        assert row["hit_rate"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "fifo"], "there is no policy 'fifo'"),
        (["--capacity", "0%"], "capacity '0%' is not a share"),
        (["--capacity", "5,x"], "is not a share"),
    ],
)
def test_bad_options(chat: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(towerctl, ["lab", "replay", str(chat), *options])
    assert result.exit_code == 1
    assert message in result.output


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    result = CliRunner().invoke(towerctl, ["lab", "replay", str(path)])
    assert (result.exit_code, "in no format" in result.output) == (1, True)
    path.write_bytes(b"\xff\xff")
    result = CliRunner().invoke(towerctl, ["lab", "replay", str(path)])
    assert (result.exit_code, "cannot be read" in result.output) == (1, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = CliRunner().invoke(towerctl, ["lab", "replay", str(empty)])
    assert (result.exit_code, "no trace files" in result.output) == (1, True)
