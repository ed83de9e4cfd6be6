"""A web server that describes itself as a llama-server and gives configured answers."""

from __future__ import annotations

import http.server
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from io import BufferedIOBase
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request whose body has not been read yet."""

    path: str
    headers: Message
    body: BufferedIOBase
    connection: socket.socket


Talk = Callable[[Asked], None]
"""Answers a request with bytes of its own making; the connection ends after it."""


def props(build: str) -> dict[str, Any]:
    """What a llama-server of this build says of itself: path -> JSON."""
    settings = {"n_ctx": 512, "params": {}}
    return {
        "/props": {"build_info": build, "total_slots": 1, "default_generation_settings": settings,
                   "model_path": "none.gguf", "model_alias": "none"},
        "/slots": [{"id": 0, "n_ctx": 512, "is_processing": False, "speculative": False}],
        "/lora-adapters": [], "/health": {"status": "ok"}, "/v1/models": {"data": [{"id": "none", "meta": {"n_vocab": 512}}]},
        "/tokenize": {"tokens": [5, 6, 7]}, "/slots/0": {"id_slot": 0, "n_saved": 3, "n_written": 16, "n_erased": 0,
                     "timings": {"save_ms": 1.0}},
        "/completion": {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "stopping_word": "",
                        "truncated": False, "has_new_line": False, "tokens_predicted": 0,
                        "timings": {"cache_n": 0, "prompt_n": 3, "prompt_ms": 1.0, "predicted_ms": 0.0}},
    }  # fmt: skip


@contextmanager
def answering(
    answers: Mapping[str, Any], save_to: Path | None = None, talks: Mapping[str, Talk] | None = None
) -> Iterator[str]:
    """While it runs, its URL. Paths in `answers` get their JSON, those that begin with a name in
    `talks` what that says; everything else is 404. With `save_to`, POST /slots/... writes a slot
    file of a version from the future there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            for name, talk in (talks or {}).items():
                if self.path.startswith(name):
                    self.close_connection = True
                    talk(Asked(self.path, self.headers, self.rfile, self.connection))
                    return
            self.answer()

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if save_to is not None and "action=save" in self.path:
                name = json.loads(body)["filename"]
                (save_to / name).write_bytes(struct.pack("<4sIII", b"qsgg", 99, 0, 0))
            answer = answers.get(self.path.partition("?")[0])
            self.send_response(404 if answer is None else 200)
            data = json.dumps(answer).encode()
            if b'"stream":true' in body:
                data = b"data: %s\n\n" % data
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
