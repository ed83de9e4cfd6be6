"""Chats with models that resume from state checkpoints roam: recurrent and hybrid ones, and such as are kept whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from sharing import metric, say, shared
from windowed_hybrid import make_windowed_hybrid

from lab.models.random_gguf import PRESETS, make_random_gguf

MakeDaemon = Callable[..., Daemon]
N = 400


def make(path: Path, arch: Any) -> Path:
    shape = replace(PRESETS["tiny"], n_layer=4)
    if arch == "windowed":
        make_windowed_hybrid(path, replace(shape, arch="lfm2"), 8)
    else:
        make_random_gguf(path, replace(shape, arch=arch))
    return path


@pytest.mark.parametrize("arch", ["mamba", "qwen35", "windowed"])
def test_a_chat_roams_with_its_state(make_daemon: MakeDaemon, tmp_path: Path, arch: str) -> None:
    """Pulled by its id, or found by the tokens of its prompt: it continues as it would have here, and what is before
    the checkpoint is not evaluated again."""
    flags = ["-m", str(make(tmp_path / "model.gguf", arch)), "-c", "2048"]
    flags += ["--shared", f"file://{tmp_path}/bucket"]
    one = make_daemon(*flags, name="a")
    flags += ["--shared-key", str(one.store_dir / "shared.key")]
    two, three = make_daemon(*flags, name="b"), make_daemon(*flags, name="c")
    prompt = [10 + k * k % 200 for k in range(N)]
    with one:
        reply, session, _ = say(one, prompt)
        ids = prompt + reply
        put = shared(one, "push", session)
        assert N - 1 <= put["rows"] < len(ids)
        sent = metric(one, "put_bytes_total")
        assert shared(one, "push", session) == put
        assert metric(one, "put_bytes_total") == sent
        expected = say(one, [*ids, 13], 16)
        assert one.stop() == 0
    with two:
        assert shared(two, "pull", session)["rows"] == put["rows"]
        answer = say(two, [*ids, 13], 16)
        assert answer[:2] == expected[:2]
        assert answer[2]["warm"] + answer[2]["hot"] == put["rows"]
        assert two.stop() == 0
    with three:
        answer = say(three, [*ids, 13], 16)
        assert answer[0] == expected[0]
        assert answer[2]["warm"] + answer[2]["hot"] >= N - 1
        assert metric(three, "lookups_found_total") == 1
        assert metric(three, "damaged_total") == metric(three, "errors_total") == 0
        assert three.stop() == 0
    for daemon in (two, three):
        with daemon.stored():
            pass
