"""Cells in several processes are those of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.replay.cells import ReplayTask, TraceSource, workers
from towerd.errors import ConfigError


def chats(path: Path) -> Path:
    """Six conversations of five turns."""
    lines = [
        {
            "timestamp": 1000 * (6 * turn + who),
            "input_length": 512 * (2 * turn + 2),
            "output_length": 9,
            "hash_ids": [100 * who + i for i in range(2 * turn + 2)],
        }
        for turn in range(5)
        for who in range(6)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_the_same_in_two_processes(tmp_path: Path) -> None:
    source = TraceSource(chats(tmp_path / "chat.jsonl"), 2048)
    tasks = [ReplayTask(source, share, ("sieve", "foresight")) for share in (0.3, 0.1, 0.5)]
    with workers(1) as alone, workers(2) as both:
        cells = list(alone(tasks))
        assert cells == list(both(tasks))
    assert [cell.capacity for cell in cells] == [0.3, 0.1, 0.5]
    assert set(cells[0].outcomes) == {"lru", "sieve", "foresight", "belady"}


def test_errors_come_back(tmp_path: Path) -> None:
    task = ReplayTask(TraceSource(chats(tmp_path / "chat.jsonl"), 2048), 0.3, ("best",))
    with workers(2) as both, pytest.raises(ConfigError, match="no policy 'best'"):
        list(both([task]))
