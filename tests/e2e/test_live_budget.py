"""Chats longer than the context, over HTTP: `--retention` and `--live-budget`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from daemon import Daemon, run_towerd

from towerd.cli.main import towerctl
from towerd.cli.sessions.sessions import drawn

MakeDaemon = Callable[..., Daemon]
N_CTX = 256
BUDGET = 64


def some_ids(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(260, 500) for _ in range(n)]


def turn_of(daemon: Daemon, ids: list[int], **fields: Any) -> requests.Response:
    body: dict[str, Any] = {
        "prompt": ids,
        "n_predict": 20,
        "ignore_eos": True,
        "return_tokens": True,
        "seed": 1,
    }
    headers = {"X-Towerd-Session": "long"}
    return requests.post(
        daemon.url + "/completion", json=body | fields, headers=headers, timeout=60
    )


def test_a_chat_far_beyond_the_context(make_daemon: MakeDaemon) -> None:
    """The header says how much was live, towerctl draws it, the store has every token; all of it
    again after a restart, when the chat is evaluated under its budget once more."""
    flags = ("--ctx-size", str(N_CTX), "--retention", "streaming", "--live-budget", str(BUDGET))
    with make_daemon(*flags) as daemon:
        ids = [1, *some_ids(20, 0)]
        for turn in range(16):
            ids += some_ids(20, turn)
            reply = turn_of(daemon, ids)
            assert reply.status_code == 200
            fields = dict(part.split("=") for part in reply.headers["X-Towerd-Reuse"].split(","))
            n_kept, n = map(int, fields["kept"].split("/"))
            assert n == len(ids)
            assert n_kept <= BUDGET
            assert turn in (0, 9) or int(fields["prefill"]) <= 41, "the chat went on"
            ids += reply.json()["tokens"]
            if turn == 8:
                assert daemon.stop() == 0
                daemon.start()
        assert len(ids) > 2 * N_CTX
        assert daemon.session_ids("long") == ids
        check_shown(daemon, len(ids))
        assert daemon.stop() == 0


def check_shown(daemon: Daemon, n_tokens: int) -> None:
    """What `towerctl sessions show` is told, and what a person sees."""
    kept = daemon.get("/towerd/v1/sessions/long?kept=1")["kept"]
    assert (kept["policy"], kept["budget"], kept["n"]) == ("streaming", BUDGET, n_tokens - 1)
    assert kept["runs"][0] == [0, 4]
    assert kept["runs"][-1][1] == kept["n"]
    assert sum(p1 - p0 for p0, p1 in kept["runs"]) <= BUDGET
    result = CliRunner().invoke(
        towerctl, ["sessions", "show", "long", "--socket", str(daemon.socket)]
    )
    shown = result.output
    assert result.exit_code == 0, shown
    assert f"of {n_tokens - 1:,} (streaming, budget {BUDGET})" in shown
    assert "|▒·" in shown
    assert "█|" in shown


def test_what_one_request_asks_for(daemon: Daemon) -> None:
    """A body's fields, and clear errors for what cannot be."""
    reply = turn_of(daemon, some_ids(150, 3), retention="streaming", live_budget=100)
    assert "kept=" in reply.headers["X-Towerd-Reuse"]
    reply = turn_of(daemon, some_ids(150, 3))
    assert "kept=" not in reply.headers["X-Towerd-Reuse"]
    for fields, words in (
        ({"live_budget": 100}, "needs a policy"),
        ({"retention": "shift", "live_budget": 100}, "needs a policy"),
        ({"retention": "magic"}, "there is no 'magic'"),
        ({"retention": 7}, "retention"),
        ({"retention": "streaming", "live_budget": 0}, "live_budget"),
        ({"retention": "streaming", "live_budget": 3}, "at least 16"),
        ({"retention": "streaming", "live_budget": 10**6}, "less than the context"),
    ):
        refused = turn_of(daemon, some_ids(10, 0), **fields)
        assert refused.status_code == 400, fields
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert words in error["message"], json.dumps(error)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--live-budget", "64"), "--live-budget needs a policy"),
        (("--retention", "magic"), "retention"),
        (("--retention", "streaming", "--engine", "llama-server"), "needs the embedded engine"),
        (("--retention", "streaming", "--live-budget", "3"), "at least 16"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    """One sentence at the start, and no daemon."""
    at = ("--port", "0", "--store-dir", str(tmp_path / "store"), "--socket", str(tmp_path / "s"))
    done = run_towerd(tmp_path, "serve", *at, *flags)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_drawing() -> None:
    """Full, half and empty characters, for chats shorter and longer than the line."""
    assert drawn([[0, 2], [4, 6]], 6, 64) == "██··██"
    assert drawn([[0, 4], [90, 100]], 100, 10) == "▒········█"
    assert drawn([[0, 10]], 10, 5) == "█████"
