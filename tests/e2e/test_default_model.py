"""`towerd serve` without a model: SmolLM2 where it was fetched, else the bundled story model."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import real_models
from daemon import TOWERD, Daemon, clean_env

from towerd.models.known import SMOLLM2

MakeDaemon = Callable[..., Daemon]
FRANCE = "What is the capital of France?"
HOW = "towerd models get smollm2"
LARGER = "towerd serve -hf "


def answer(daemon: Daemon, **fields: object) -> str:
    """What a chat of one question is told."""
    messages = [{"role": "user", "content": FRANCE}]
    body = {"messages": messages, "max_tokens": 32, **fields}
    text = daemon.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def lines_with(words: str, daemon: Daemon) -> int:
    """How many lines of the log have them."""
    return sum(words in line for line in daemon.log.splitlines())


def put_smollm2(root: Path) -> None:
    """SmolLM2 in the models directory of a daemon below `root`."""
    models = Path(clean_env(root)["XDG_DATA_HOME"]) / "towerd" / "models"
    models.mkdir(parents=True)
    (models / SMOLLM2.file).symlink_to(real_models.smollm2())


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_the_first_answer_is_right(make_daemon: MakeDaemon, engine: str) -> None:
    """With the sampling that the model recommends and without any, from either engine."""
    daemon = make_daemon("--engine", engine)
    put_smollm2(daemon.root)
    with daemon:
        assert HOW not in daemon.log
        assert lines_with(LARGER, daemon) == 1
        assert lines_with("warning", daemon) == 0
        assert daemon.get("/props")["model_path"].endswith(SMOLLM2.file)
        assert answer(daemon, seed=1)
        assert "Paris" in answer(daemon, temperature=0)


def test_gemma_knows_it_too(make_daemon: MakeDaemon) -> None:
    """A base model with sliding windows, which continues text."""
    with make_daemon("-m", str(real_models.gemma()), "--ctx-size", "512") as daemon:
        assert "Paris" in daemon.complete(f"Question: {FRANCE}\nAnswer:", 4)["content"]


def test_without_it_the_story_model_says_what_to_run(make_daemon: MakeDaemon) -> None:
    with make_daemon() as daemon:
        assert lines_with(HOW, daemon) == lines_with(LARGER, daemon) == 1
        assert lines_with("warning", daemon) == 0
        assert daemon.get("/props")["model_path"].endswith("stories260K.gguf")
    with make_daemon("-m", "stories", name="meant") as daemon:
        assert HOW not in daemon.log
        assert daemon.get("/props")["model_path"].endswith("stories260K.gguf")


@pytest.mark.parametrize("said", ["y", "n"])
def test_on_a_terminal_it_is_offered(tmp_path: Path, said: str) -> None:
    """With size and licence. Where it cannot be had, or is not wanted, the story model serves."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [*TOWERD, "serve", "--port", "0", "--socket", str(tmp_path / "s")],
        stdin=end,
        stdout=end,
        stderr=end,
        cwd=tmp_path,
        env=clean_env(tmp_path) | {"PIP_NO_INDEX": "1"},
    )
    os.close(end)
    shown = b""

    def read_until(words: bytes) -> None:
        nonlocal shown
        while words not in shown:
            shown += os.read(terminal, 4096)

    try:
        read_until(b"Fetch SmolLM2-135M-Instruct, 88.6 MiB, Apache-2.0? [Y/n]")
        os.write(terminal, f"{said}\n".encode())
        read_until(b"towerd is ready")
        assert (b"pip could not fetch" in shown) == (said == "y")
        assert HOW.encode() in shown
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
