"""Pictures for models of every kind of memory: llama-server's words, before and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from pictures import answered, counts, look_at, say

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Arch, Shape
from lab.models.vision import TOKENS_AN_IMAGE, make_projector
from towerd.cli.bench.harness.servers import llama_server

MakeDaemon = Callable[..., Daemon]
SHAPE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)
FLAGS = ("-c", "1024", "-t", "1", "-tb", "1", "-ctk", "f32", "-ctv", "f32")


def files(folder: Path, arch: Arch) -> tuple[Path, Path]:
    """A model and its projector."""
    model, projector = folder / f"{arch}.gguf", folder / "mmproj.gguf"
    make_random_gguf(model, replace(SHAPE, arch=arch))
    make_projector(projector, SHAPE.n_embd)
    return model, projector


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba"])
def test_a_chat_goes_on(make_daemon: MakeDaemon, tmp_path: Path, arch: Arch) -> None:
    """Sliding windows, recurrent layers beside attention, and nothing else: a picture before the
    window's edge and one in it are encoded once each."""
    model, projector = files(tmp_path, arch)
    chat: list[Any] = [look_at(1, text="one two three four " * 3)]
    with llama_server(model, *FLAGS, "-np", "1", "--mmproj", str(projector)) as alone:
        flags = ("--checkpoint-tokens", "32", "--no-anticipate")
        with make_daemon("-m", str(model), *FLAGS, "--mmproj", str(projector), *flags) as daemon:
            n_before = 0
            for turn in range(4):
                wanted, said = say(alone.url, chat), say(daemon.url, chat)
                assert (said.text, said.n_prompt) == (wanted.text, wanted.n_prompt), turn
                assert said.n_prompt - said.reuse["prefill"] >= n_before
                n_before = said.n_prompt
                chat = answered(chat, said, "five six seven eight " * 4)
                if turn == 1:
                    assert counts(daemon) == (1, 1)
                    assert daemon.stop() == 0, daemon.log
                    daemon.start()
                    chat[-1] = look_at(2, text="nine ten " * 6)
            assert counts(daemon) == (1, 1)
            assert daemon.stop() == 0, daemon.log
        with daemon.stored():
            pass


def test_a_picture_that_does_not_fit_a_micro_batch(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Gemma 3 sees it in both directions, so that it cannot be evaluated in parts: a 400 that says
    what to do."""
    model, projector = files(tmp_path, "gemma3")
    small = ("-b", "2", "-ub", "2", "--live-sequences", "1", "-np", "1")
    with make_daemon("-m", str(model), *FLAGS, "--mmproj", str(projector), *small) as daemon:
        said = daemon.post("/v1/chat/completions", {"messages": [look_at(1)]}, 400)
        assert f"--ubatch-size {TOKENS_AN_IMAGE}" in said["error"]["message"]
        daemon.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        )
