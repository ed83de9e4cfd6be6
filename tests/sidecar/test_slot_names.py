"""POST /slots/{id}?action=save and restore, on both engines, and with llama-server on the other side of a file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from daemon import Daemon

from towerd.cli.bench.harness.servers import llama_server as llama_server_alone
from towerd.models.bundled import bundled_model
from towerd.slots.slotfile import HEADER_BYTES, parse_tokens

FRANCE, GERMANY = "What is the capital of France?", "What is the capital of Germany?"
EXACT = ("-c", "512", "-ctk", "f32", "-ctv", "f32", "-np", "2", "-fa", "off")
Make = Callable[..., Daemon]


@pytest.fixture(params=["embedded", "llama-server"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """`make(*flags, name=)`: a daemon that saves to the folder `saves`."""
    made: list[Daemon] = []

    def start(*flags: str, name: str = "d") -> Daemon:
        if request.param == "llama-server":
            request.getfixturevalue("llama_server")
        words = ("--engine", request.param, "-m", str(bundled_model()), *EXACT)
        made.append(
            Daemon(tmp_path / name, *words, "--slot-save-path", str(tmp_path / "saves"), *flags)
        )
        return made[-1].start()

    yield start
    for each in made:
        if each.process is not None:
            each.kill()


def act(daemon: Daemon, action: str, slot: int = 0, status: int = 200, **kwargs: Any) -> Any:
    body = {"filename": kwargs.pop("filename", "chat.bin")}
    return daemon.post(f"/slots/{slot}?action={action}", body, status, **kwargs)


def keyed(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def tokens_of(path: Path) -> list[int]:
    data = path.read_bytes()
    n_words = struct.unpack_from("<III", data)[2]
    words = np.frombuffer(data, "<i4", n_words, HEADER_BYTES)
    return [int(token) for token in parse_tokens(words)[0]]


def test_here_and_there(make: Make, llama_server: Path, tmp_path: Path) -> None:
    """What is saved here continues in a llama-server as it would here, and the reverse; after a restart
    without the store, too."""
    daemon, file = make(), tmp_path / "saves" / "chat.bin"
    said = daemon.complete(FRANCE, 16, id_slot=1)
    saved = act(daemon, "save", 1)
    assert saved["n_written"] == file.stat().st_size
    assert [path.name for path in file.parent.iterdir()] == ["chat.bin"]
    ids = tokens_of(file)
    assert saved["n_saved"] == len(ids) == said["tokens_evaluated"] + 15
    assert ids[-15:] == said["tokens"][:15]
    flags = (*EXACT[:-4], "-np", "1", "-fa", "off", "--slot-save-path", str(file.parent))
    with llama_server_alone(bundled_model(), *flags) as alone:
        url = f"{alone.url}/slots/0?action="
        reply = requests.post(url + "restore", json={"filename": "chat.bin"}, timeout=30).json()
        assert (reply["n_restored"], reply["n_read"]) == (len(ids), saved["n_written"])
        body = {"prompt": FRANCE + said["content"], "n_predict": 8, "temperature": 0, "id_slot": 0}
        there = requests.post(alone.url + "/completion", json=body, timeout=30).json()
        assert there["timings"]["cache_n"] >= len(ids) - 1
        here = daemon.post("/completion", body)
        assert here["content"] == there["content"]
        requests.post(url + "save", json={"filename": "there.bin"}, timeout=30)
    other = make(name="other")
    restored = act(other, "restore", filename="there.bin")
    assert restored["n_restored"] == len(tokens_of(file.with_name("there.bin")))
    again = other.post("/completion", body | {"id_slot": 1})
    assert again["content"] == there["content"]
    assert again["timings"]["cache_n"] >= len(ids) - 1
    assert other.get("/towerd/v1/sessions")["sessions"][1:] == []


def test_which_chat_a_slot_has(make: Make, tmp_path: Path) -> None:
    """Two saves hold what their slots had; an erased slot has nothing; a deleted chat is not saved."""
    daemon, folder = make(), tmp_path / "saves"
    for slot, prompt in enumerate((FRANCE, GERMANY)):
        daemon.complete(prompt, 4, id_slot=slot)
    assert {act(daemon, "save", slot, filename=f"{slot}")["filename"] for slot in (0, 1)} == {
        "0",
        "1",
    }
    first, second = (tokens_of(folder / name) for name in "01")
    assert first != second
    assert act(daemon, "erase", 0)["n_erased"] == len(first)
    assert "empty" in act(daemon, "save", 0, 400, filename="x")["error"]["message"]
    for session in daemon.get("/towerd/v1/sessions")["sessions"]:
        requests.delete(f"{daemon.url}/towerd/v1/sessions/{session['id']}", timeout=30)
    daemon.post("/towerd/v1/gc", {})
    assert "deleted" in act(daemon, "save", 1, 400, filename="x")["error"]["message"]
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
    assert act(daemon, "restore", 0, filename="1")["n_restored"] == len(second)


def test_tenants(make: Make, tmp_path: Path) -> None:
    """Neither a slot nor a file of another tenant is within reach."""
    daemon = make("--api-key", "ann:ka", "--api-key", "bob:kb")
    ann, bob = (keyed(key) for key in ("ka", "kb"))
    daemon.post("/completion", {"prompt": FRANCE, "n_predict": 2}, **ann)
    act(daemon, "save", 0, **ann)
    assert "empty" in act(daemon, "save", 0, 400, **bob)["error"]["message"]
    (folder,) = (tmp_path / "saves").iterdir()
    for name in (
        "chat.bin",
        f"{folder.name}",
        f"{folder.name}/chat.bin",
        f"../{folder.name}/chat.bin",
    ):
        act(daemon, "restore", 0, 400, filename=name, **bob)
    assert folder.stat().st_mode & 0o777 == 0o700
    act(daemon, "restore", 0, **ann)


BAD_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "../a",
    "a\\b",
    "a..b",
    "a.",
    " a",
    "a:b",
    "\u202e/..",
    "x" * 256,
    "a\0b",
]


def test_bad_requests(make: Make, tmp_path: Path) -> None:
    """llama-server's refusals, each in a sentence without a path, and nothing is left behind."""
    daemon, folder = make(), tmp_path / "saves"
    daemon.complete(FRANCE, 2, id_slot=0)
    for name in BAD_NAMES:
        said = act(daemon, "save", 0, 400, filename=name)["error"]["message"]
        assert said == "Invalid filename"
    for slot in ("2", "99", "-1", "x", "1" * 20):
        reply = requests.post(f"{daemon.url}/slots/{slot}?action=erase", timeout=30)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "Invalid slot ID")
    for action in ("", "explode"):
        assert act(daemon, action, 0, 400)["error"]["message"] == "Invalid action"
    act(daemon, "save")
    whole = (folder / "chat.bin").read_bytes()
    bad = {
        "empty": b"",
        "cut": whole[:20],
        "magic": b"x" + whole[1:],
        "version": whole[:4] + b"\xff" + whole[5:],
        "long": whole[:8] + struct.pack("<I", 2**31) + whole[12:],
        "ids": whole[:HEADER_BYTES] + struct.pack("<iii", 10**9, 5, 5) + whole[HEADER_BYTES + 12 :],
    }
    for name, data in bad.items():
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    for name in (*bad, "fifo", "folder", "none"):
        said = act(daemon, "restore", 0, 400, filename=name)["error"]["message"]
        assert said.startswith("Unable to restore slot: "), said
        assert str(tmp_path) not in said
    said = act(daemon, "save", 0, 500, filename="folder")["error"]["message"]
    assert said == "Unable to save slot"
    assert not [path for path in folder.iterdir() if "half" in path.name]
    assert daemon.complete(FRANCE, 2)["tokens_predicted"] == 2
