"""A conversation moves between two daemons as a file and continues as if it had never moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from daemon import Daemon, reuse_of

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.cli.main import towerctl
from towerd.models.bundled import bundled_model

MakeDaemon = Callable[..., Daemon]
START = "Once upon a time there was a little girl named Lily. "


def ctl(*args: object, code: int = 0) -> str:
    """towerctl's output."""
    result = CliRunner().invoke(towerctl, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result.output


def say(daemon: Daemon, prompt: list[int], n: int = 8) -> tuple[list[int], str, dict[str, int]]:
    """(token ids of the greedy reply, session, where the prompt's tokens came from)."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["tokens"], reply.headers["X-Towerd-Session"], reuse_of(reply.headers)


def without_segments(shown: dict[str, Any]) -> dict[str, Any]:
    """A shown session without its rows and what is numbered anew in each store."""
    places = {turn["id"]: place for place, turn in enumerate(shown["turns"])} | {None: None}
    session = shown["session"] | {"leaf": places[shown["session"]["leaf"]]}
    turns = []
    for turn in shown["turns"]:
        rest = {k: v for k, v in turn.items() if k not in ("id", "prompt_node", "reply_node")}
        turns.append(rest | {"parent": places[turn["parent"]]})
    return shown | {"session": session, "turns": turns, "rows": []}


def test_a_conversation_moves(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Three turns and an edited one: listed, shown and continued on the second daemon like on
    the first, whose rows it has not; a second import changes nothing; both stores stay sound."""
    one, two = make_daemon(name="a"), make_daemon(name="b")
    path = tmp_path / "chat.tower"
    with one, two:
        prompt = one.post("/tokenize", {"content": START + "She", "add_special": True})["tokens"]
        for more in (" dog", " and", " ran"):
            reply, session, _ = say(one, prompt)
            prompt += reply + one.post("/tokenize", {"content": more})["tokens"]
        say(one, prompt[:30])
        reply, session, _ = say(one, prompt)
        ctl("export", session, "-o", path, "--socket", one.socket)
        said = ctl("import", path, "--socket", two.socket)
        assert said == f"Imported 5 turns of session {session}.\n"
        where = f"/towerd/v1/sessions/{session}?ids=1&text=1"
        shown = without_segments(one.get(where))
        assert without_segments(two.get(where)) == shown
        assert "is here already" in ctl("import", path, "--socket", two.socket)
        assert without_segments(two.get(where)) == shown
        assert two.get("/towerd/v1/sessions")["sessions"][0]["id"] == session
        ids = one.session_ids(session)
        raw = 4 * sum(turn["n_prompt"] + turn["n_reply"] for turn in shown["turns"])
        assert path.stat().st_size < raw
        next_here, same, reuse_here = say(one, [*ids, 13], 16)
        next_there, moved, reuse_there = say(two, [*ids, 13], 16)
        assert (same, moved) == (session, session)
        assert next_there == next_here
        assert reuse_here["prefill"] < 8
        assert reuse_there["prefill"] == len(ids) + 1
        assert say(two, [*ids, 13, *next_there, 14])[2]["prefill"] < 8
        assert two.stop() == 0, two.log
    with two.stored():
        pass


def test_another_vocabulary(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """The chat is listed and read as text, with a daemon and without, and goes on to one that has its
    vocabulary, whatever the weights; the file alone is read as text, too."""
    path, back = tmp_path / "chat.tower", tmp_path / "back.tower"
    with make_daemon(name="a") as one:
        prompt = one.post("/tokenize", {"content": START, "add_special": True})["tokens"]
        session = say(one, prompt)[1]
        ctl("export", session, "-o", path, "--socket", one.socket)
        shown = one.get(f"/towerd/v1/sessions/{session}?ids=1&text=1")
    assert ctl("read", path) == shown["text"] + "\n"
    model = tmp_path / "other.gguf"
    make_random_gguf(model, PRESETS["tiny"])
    with make_daemon("-m", str(model), "-c", "512", name="vocabulary") as other:
        own = f"{other.url}/towerd/v1/sessions/{session}"
        said = ctl("import", path, "--socket", other.socket)
        assert "which another tokenizer cut" in said
        assert "is here already" in ctl("import", path, "--socket", other.socket)
        (listed,) = other.get("/towerd/v1/sessions")["sessions"]
        assert (listed["id"], listed["tokenizer"] != "") == (session, True)
        assert other.get(f"/towerd/v1/sessions/{session}?text=1")["text"] == shown["text"]
        assert other.get("/towerd/v1/segments")["segments"] == []
        for verb in ("freeze", "thaw", "recode"):
            reply = requests.post(f"{own}/{verb}", json={}, timeout=30)
            assert reply.status_code == 400, reply.text
            assert "where its model is served" in reply.json()["error"]["message"]
        ctl("export", session, "-o", back, "--socket", other.socket)
        assert other.stop() == 0
    alone = ("--store-dir", other.store_dir)
    ctl("export", session, "-o", back, "--force", *alone)
    assert shown["text"] in ctl("sessions", "show", session, "--text", *alone)
    model = tmp_path / "weights.gguf"
    make_random_gguf(model, PRESETS["tiny"], vocab=bundled_model())
    with make_daemon("-m", str(model), "-c", "512", name="weights") as other:
        ctl("import", back, "--socket", other.socket)
        assert other.get(f"/towerd/v1/sessions/{session}?ids=1")["ids"] == shown["ids"]


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_is_refused(daemon: Daemon, tmp_path: Path, damage: str) -> None:
    """Nothing of a damaged file is stored; the good copy is read."""
    session = say(daemon, [1, 50, 51, 52, len(damage)])[1]
    path, bad = tmp_path / "a.tower", tmp_path / "b.tower"
    ctl("export", session, "-o", path, "--socket", daemon.socket)
    data = bytearray(path.read_bytes())
    requests.delete(f"{daemon.url}/towerd/v1/sessions/{session}", timeout=30)
    before = daemon.get("/towerd/v1/sessions")
    if damage == "flip":
        data[len(data) // 2] ^= 1
    bad.write_bytes(data if damage == "flip" else data[:-1])
    words = {"flip": "checksum", "cut": "truncated"}[damage]
    assert words in ctl("import", bad, "--socket", daemon.socket, code=1)
    assert daemon.get("/towerd/v1/sessions") == before
    assert "Imported 1 turn " in ctl("import", path, "--socket", daemon.socket)
