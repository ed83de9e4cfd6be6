"""`towerd serve -hf`: from nothing to an answer, and again without a network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from daemon import Daemon
from hub_server import hub_server

from towerd.models.bundled import bundled_model

MakeDaemon = Callable[..., Daemon]
REPO = "owner/stories-GGUF"


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_a_model_in_one_step(make_daemon: MakeDaemon, engine: str) -> None:
    """It has the repository's name, and answers to every other."""
    flags = ("--engine", engine, "-hf", REPO)
    with hub_server() as hub:
        hub.repos[REPO] = {"stories-Q8_0.gguf": bundled_model().read_bytes()}
        with make_daemon(*flags, HF_ENDPOINT=hub.url) as daemon:
            assert daemon.get("/v1/models")["data"][0]["id"] == f"{REPO}:Q8_0"
            answer = daemon.post("/v1/completions", {"model": "x", "prompt": "a", "max_tokens": 2})
            assert answer["usage"]["completion_tokens"] == 2
            assert f"Fetching {REPO} (1.0 MiB)" in daemon.log
    daemon.flags = (*flags, "--offline")
    with daemon:
        assert daemon.get("/v1/models")["data"][0]["id"] == f"{REPO}:Q8_0"
        assert "Fetching" not in daemon.log
