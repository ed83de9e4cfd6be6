"""Sounds on the embedded engine: llama-server's words, and rows that are reused like text's."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from daemon import Daemon
from hearing_model import TOKENS_A_SOUND, make_hearing_projector, sound
from pictures import answered, counts, look_at, say

from towerd.cli.bench.harness.servers import llama_server
from towerd.models.bundled import bundled_model

MakeDaemon = Callable[..., Daemon]
N_EMBD_TEXT = 64
"""Of the bundled model."""


def listen(seed: int) -> dict[str, Any]:
    """A user's message with a sound and words behind it."""
    part = {"type": "input_audio", "input_audio": {"data": sound(seed), "format": "wav"}}
    return {"role": "user", "content": [part, {"type": "text", "text": "What was that?"}]}


def test_a_sound_is_heard_once(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Two chats, each with its own, before and after a restart; a picture is refused, and so is a
    prompt that ends with a sound, which nothing can be sampled behind."""
    projector = tmp_path / "mmproj.gguf"
    make_hearing_projector(projector, N_EMBD_TEXT)
    exact = ("-ctk", "f32", "-ctv", "f32")
    flags = ("-c", "1024", "-t", "1", *exact, "--mmproj", str(projector))
    with llama_server(bundled_model(), *flags, "-np", "1") as alone:
        with make_daemon(*flags, "--no-anticipate") as daemon:
            texts: list[str] = []
            session = ""
            for seed in (1, 2):
                chat: list[Any] = [listen(seed)]
                for n_question, question in enumerate(("And then?", "Why?")):
                    wanted, said = say(alone.url, chat), say(daemon.url, chat)
                    assert (said.text, said.n_prompt) == (wanted.text, wanted.n_prompt)
                    assert counts(daemon) == ((0, 0) if n_question else (1, 1))
                    assert daemon.stop() == 0, daemon.log
                    daemon.start()
                    chat = answered(chat, said, question)
                    texts.append(said.text)
                    session = said.session
            assert texts[0] != texts[2]
            ids = daemon.session_ids(session)
            assert sum(id < 0 for id in ids) == TOKENS_A_SOUND
            path = f"/towerd/v1/sessions/{session}"
            (key,) = daemon.get(path + "/chat")["media"]
            kept = requests.get(f"{daemon.url}{path}/media/{key}", timeout=30)
            assert kept.headers["Content-Type"] == "audio/wav"
            assert base64.b64encode(kept.content).decode() == sound(seed)
            wanted, got = (
                requests.get(url + "/props", timeout=30).json() for url in (alone.url, daemon.url)
            )
            assert got["modalities"] == wanted["modalities"] | {"video": False}
            body: Any = {"messages": [look_at(1)]}
            assert (
                "image input" in daemon.post("/v1/chat/completions", body, 400)["error"]["message"]
            )
            prompt = {"prompt_string": f"a {got['media_marker']}", "multimodal_data": [sound(1)]}
            refused = daemon.post("/completion", {"prompt": prompt}, 400)
            assert "text has to follow" in refused["error"]["message"]
