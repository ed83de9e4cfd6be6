"""`towerd serve -hf`: from nothing to an answer, and again without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from daemon import Daemon, clean_env
from hub_server import hub_server

from towerd.cli.bench.harness.servers import ServerProcess
from towerd.engine.llama_server.process.binary import find_binary, library_env
from towerd.engine.llama_server.process.process import free_port
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


@contextmanager
def llama_server(root: Path, *flags: str, **env: str) -> Iterator[str]:
    """The id of the model that a llama-server serves, with the user's directories below `root`."""
    binary, port = find_binary(None), free_port()
    command = [str(binary), "--port", str(port), "-t", "1", "-c", "128", *flags]
    environment = clean_env(root) | library_env(binary) | env
    with ServerProcess(command, port=port, env=environment) as process:
        models = requests.get(f"{process.url}/v1/models", timeout=60).json()
        yield models["data"][0]["id"]


def test_llama_server_shares_the_files(make_daemon: MakeDaemon) -> None:
    """What either fetched, the other serves without a network: of several it is the same one."""
    with hub_server() as hub:
        model = bundled_model().read_bytes()
        hub.repos[REPO] = {"stories-F16.gguf": model, "stories-Q8_0.gguf": model}
        hub.repos["owner/other-GGUF"] = {"other-Q8_0.gguf": model}
        with make_daemon("-hf", REPO, HF_ENDPOINT=hub.url) as daemon:
            assert daemon.get("/health")["status"] == "ok"
        fetched = list(hub.downloads)
        with llama_server(daemon.root, "-hf", REPO, "--offline") as name:
            assert name == REPO
        with llama_server(daemon.root, "-hf", "owner/other-GGUF", HF_ENDPOINT=hub.url):
            pass
        assert fetched == [("stories-Q8_0.gguf", "")]
    with make_daemon("-m", "other") as offline:
        assert offline.get("/v1/models")["data"][0]["id"] == "owner/other-GGUF:Q8_0"
