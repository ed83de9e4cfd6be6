"""towerctl at a server that is no towerd, or another version of one: one sentence, whatever it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from towerd.cli.main import towerctl

COMMANDS = (
    "sessions ls",
    "sessions show x",
    "sessions rm -y x",
    "search a",
    "freeze x",
    "freeze --idle 1d",
    "thaw x",
    "recode x",
    "recode --all",
    "export -o OUT x",
    "import FILE",
    "segments ls",
    "segments show 1",
    "why 1",
    "why abcdef",
    "trie",
    "pin",
    "pin 1",
    "pin --session x",
    "unpin 1",
    "unpin --base b",
    "stats",
    "top --once",
    "verify",
    "gc",
    "calibrate",
    "precache SPEC",
)
STORE = dict.fromkeys(
    ("sessions", "frozen_sessions", "copied_sessions", "cold_bytes", "bases", "segments"), 1
)
WRONG: tuple[Any, ...] = (
    {"hello": "world"},
    {},
    [],
    None,
    "text",
    {"sessions": {}, "segments": 3, "session": None, "results": [1], "pins": [[]], "bases": "x"},
    {
        "sessions": [{}],
        "segments": [{}],
        "session": {},
        "results": [{}],
        "pins": [{}],
        "trie": [{}],
    },
    {"engine": {}, "store": STORE, "version": "1", "verify": {}, "gc": {"files": "many"}},
    {"calibration": {"state": "done", "progress": 7}, "segment": {"id": 1}, "why": {}, "pinned": 1},
    {"error": "text"},
    {"progress": {"done": None, "total": []}, "tokens": ["a"], "data": [3], "prompt": 4},
)


class Foreign(BaseHTTPRequestHandler):
    """Answers everything with the server's `answer`."""

    def _reply(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = json.dumps(self.server.answer).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _reply

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", COMMANDS)
def test_one_sentence(command: str, foreign: Any, tmp_path: Path) -> None:
    """It names the server and asks whether that is a towerd."""
    (tmp_path / "s.tower").write_bytes(b"x")
    (tmp_path / "spec.yaml").write_text("platform:\n  name: a\n  text: abc\n")
    places = {"OUT": "out", "FILE": "s.tower", "SPEC": "spec.yaml"}
    words = [str(tmp_path / places[word]) if word in places else word for word in command.split()]
    url = f"http://127.0.0.1:{foreign.server_port}"
    for foreign.answer in WRONG:
        for more in ((), ("--json",)):
            done = CliRunner().invoke(towerctl, [*words, "--url", url, *more])
            assert isinstance(done.exception, SystemExit), (foreign.answer, done.exception)
            (said,) = done.stderr.splitlines()
            assert done.exit_code == 1, foreign.answer
            assert f"The daemon at {url} does not answer properly: " in said
            assert "is it a towerd" in said
