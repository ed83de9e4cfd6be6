"""Streams that are being answered take none of the room for bodies, on both engines and behind a router."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from daemon import Daemon

from towerd.models.bundled import bundled_model

N_STREAMS = 6
BODY_BYTES_MAX = 65_536
"""Room for four bodies of this length."""


@pytest.mark.parametrize("engine", ["embedded", "llama-server", "router"])
def test_streams_take_no_room(tmp_path: Path, engine: str) -> None:
    flags = ["-c", "4096", "-np", str(N_STREAMS), "-t", "1"]
    if engine == "router":
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "story.gguf").symlink_to(bundled_model())
        flags += ["--models-dir", str(tmp_path / "models")]
    else:
        flags += ["--engine", engine]
    flags += ["--request-bytes-max", str(BODY_BYTES_MAX)]
    body = {"prompt": "Once", "n_predict": 500, "ignore_eos": True, "stream": True, "n_probs": 50}
    data = json.dumps(body | {"pad": "x" * (BODY_BYTES_MAX - 1_000)}).encode()
    with Daemon(tmp_path / "d", *flags) as daemon, ExitStack() as stack:
        for _ in range(N_STREAMS):
            url = daemon.url + "/completion"
            reply = stack.enter_context(requests.post(url, data=data, stream=True, timeout=60))
            assert reply.status_code == 200, reply.text
