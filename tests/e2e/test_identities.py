"""One chat through everything that changes its rows, and some of what changes its tokens.

The oracle is its text, which no change of settings, weights or models may touch.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from daemon import Daemon, reuse_of, run_towerctl
from gguf import GGUFReader
from lora_adapter import write_adapter

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.llama_library import lib
from towerd.models.bundled import bundled_model
from towerd.store import Store, latest_row_identity

MakeDaemon = Callable[..., Daemon]
START = "Once upon a time there was a little girl who had a dog."
DAYS_S = 86_400


def quantized(path: Path) -> Path:
    """The bundled model in Q8_0."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = lib.LLAMA_FTYPE_MOSTLY_Q8_0
    source = str(bundled_model()).encode()
    assert lib.llama_model_quantize(source, str(path).encode(), ctypes.byref(params)) == 0
    return path


def cut_otherwise(path: Path) -> Path:
    """The bundled model with the same tokens, of which two have other scores."""
    shutil.copy(bundled_model(), path)
    field = GGUFReader(path).fields["tokenizer.ggml.scores"]
    scores = np.concatenate([field.parts[at] for at in field.data]).astype("<f4")
    data = path.read_bytes()
    at = data.index(scores.tobytes())
    scores[[400, 401]] = scores[[401, 400]]
    path.write_bytes(data[:at] + scores.tobytes() + data[at + scores.nbytes :])
    return path


class Chat:
    """A conversation that a client continues with all of its tokens each time."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.session = ""
        self.text = ""
        """All of it, as the daemon that took the last turn showed it."""

    def say(self, daemon: Daemon, prompt: Any) -> dict[str, int]:
        """Have one more turn; where the tokens of its prompt came from."""
        body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "return_tokens": True}
        reply = requests.post(
            daemon.url + "/completion", json={**body, "ignore_eos": True}, timeout=60
        )
        assert reply.status_code == 200, reply.text
        session = reply.headers["X-Towerd-Session"]
        assert session == (self.session or session)
        self.session = session
        kept = daemon.get(f"/towerd/v1/sessions/{session}?ids=1&text=1")
        self.ids, self.text = kept["ids"], kept["text"]
        return reuse_of(reply.headers)

    def shown(self, daemon: Daemon) -> dict[str, Any]:
        """What the daemon says of it: it is the only one listed."""
        (listed,) = daemon.get("/towerd/v1/sessions")["sessions"]
        shown: dict[str, Any] = daemon.get(f"/towerd/v1/sessions/{self.session}?text=1")
        assert listed == shown["session"]
        assert listed["id"] == self.session
        return shown

    def resumes(self, daemon: Daemon) -> dict[str, int]:
        """It reads as it did and its next turn is recorded in it; where the tokens came from."""
        assert self.shown(daemon)["text"] == self.text
        before, text = list(self.ids), self.text
        reuse = self.say(daemon, [*before, 400, 401])
        assert self.ids[: len(before)] == before
        assert self.text.startswith(text)
        return reuse


def test_a_chat_outlives_everything(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    chat = Chat()

    def served(*flags: str) -> Daemon:
        return make_daemon("-c", "1024", "-t", "1", "--fidelity", "exact", *flags, name="one")

    with served() as daemon:
        chat.say(daemon, START)
        rows = chat.shown(daemon)["rows"]
        assert [each["cache_types"] for each in rows] == ["f16/f16"]
        assert daemon.stop() == 0
    for flags in (
        ("-ctk", "q8_0"),
        ("-m", str(quantized(tmp_path / "q8.gguf"))),
        ("--lora", str(write_adapter(tmp_path / "lora.gguf", bundled_model(), seed=1))),
    ):
        with served(*flags) as daemon:  # evaluated again once, then restored
            chat.resumes(daemon)
            assert daemon.stop() == 0
            daemon.start()
            reuse = chat.resumes(daemon)
            assert daemon.stop() == 0
        assert reuse["warm"] + reuse["hot"] > len(START) // 8
    with served() as daemon:  # the first rows are still there
        assert chat.resumes(daemon)["warm"] > 8
        rows = chat.shown(daemon)["rows"]
        assert len(rows) == 3
        assert rows[0]["is_served"]
        text = chat.shown(daemon)["text"]
        assert daemon.stop() == 0
    check_other_tokenizers(make_daemon, tmp_path, chat, text)
    there = check_moved(make_daemon, tmp_path, chat, text)
    unused_for(there.store_dir, 30)
    with there.start():
        assert chat.resumes(there)["prefill"] <= 3
        assert there.stop() == 0


def check_other_tokenizers(make_daemon: MakeDaemon, tmp_path: Path, chat: Chat, text: str) -> None:
    """Under another vocabulary, and under one that only looks alike, it is listed and read."""
    other = tmp_path / "other.gguf"
    make_random_gguf(other, PRESETS["tiny"])
    alike = cut_otherwise(tmp_path / "alike.gguf")
    for model in (other, alike):
        with make_daemon("-m", str(model), "-c", "1024", "-t", "1", name="one") as daemon:
            shown = chat.shown(daemon)
            assert shown["text"].strip() == text.strip()
            assert shown["session"]["tokenizer"]
            assert shown["rows"] == []
            title = {"title": f"under {model.stem}"}
            where = f"{daemon.url}/towerd/v1/sessions/{chat.session}"
            assert requests.patch(where, json=title, timeout=30).json()["session"]["title"]
            body: dict[str, Any] = {"prompt": text, "n_predict": 4, "ignore_eos": True}
            reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
            assert reply.headers["X-Towerd-Session"] != chat.session
            requests.delete(
                f"{daemon.url}/towerd/v1/sessions/{reply.headers['X-Towerd-Session']}", timeout=30
            )
            assert daemon.stop() == 0


def check_moved(make_daemon: MakeDaemon, tmp_path: Path, chat: Chat, text: str) -> Daemon:
    """Exported from here and imported elsewhere, it reads the same there and continues there;
    returns the other daemon, stopped."""
    path = tmp_path / "chat.tower"
    with make_daemon("-c", "1024", "-t", "1", name="one") as daemon:
        assert run_towerctl(daemon, "export", chat.session, "-o", str(path)).returncode == 0
        assert daemon.stop() == 0
    model = ("-m", str(tmp_path / "q8.gguf"))
    there = make_daemon("-c", "1024", "-t", "1", "--freeze-after", "3600", *model, name="two")
    with there:
        assert run_towerctl(there, "import", str(path)).returncode == 0
        assert chat.shown(there)["text"] == text
        chat.resumes(there)
        assert there.stop() == 0
    return there


def unused_for(store_dir: Path, days: int) -> None:
    """Set back the clock of everything in a store."""
    with Store.open(store_dir, latest_row_identity) as store, store.locked():
        catalog, by = store.state.catalog, days * DAYS_S
        with catalog.transaction():
            catalog.run(
                "UPDATE sessions SET updated = updated - ?, created = created - ?", (by, by)
            )
            catalog.run("UPDATE segments SET last_used = last_used - ?", (by,))


def test_a_file_that_changed_under_its_name_gives_no_rows(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """Other weights at the same path: the chat is there, and all of it is evaluated."""
    path, chat = tmp_path / "model.gguf", Chat()
    shutil.copy(bundled_model(), path)
    with make_daemon("-m", str(path), "-c", "1024", "-t", "1") as daemon:
        chat.say(daemon, START)
        assert daemon.stop() == 0
        shutil.copy(quantized(tmp_path / "q8.gguf"), path)
        daemon.start()
        reuse = chat.resumes(daemon)
        assert reuse["warm"] + reuse["hot"] + reuse["live"] == 0


@pytest.mark.parametrize("damage", [b"", b"TWRV" + bytes(40)])
def test_a_damaged_vocabulary_says_what_to_do(
    make_daemon: MakeDaemon, tmp_path: Path, damage: bytes
) -> None:
    other, chat = tmp_path / "other.gguf", Chat()
    make_random_gguf(other, PRESETS["tiny"])
    with make_daemon("-c", "1024", "-t", "1", name="one") as daemon:
        chat.say(daemon, START)
        assert daemon.stop() == 0
    (kept,) = (tmp_path / "one" / "store" / "tokenizers").iterdir()
    kept.write_bytes(damage)
    with make_daemon("-m", str(other), "-c", "1024", "-t", "1", name="one") as daemon:
        where = f"/towerd/v1/sessions/{chat.session}"
        assert daemon.get(where)["session"]["id"] == chat.session
        reply = requests.get(f"{daemon.url}{where}?text=1", timeout=30)
        assert reply.status_code == 500
        assert "serve its model once" in reply.json()["error"]["message"]
