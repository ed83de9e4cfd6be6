"""Models of every kind of memory through the whole product: a daemon, its commands, a second one.

Each answer is compared with monolithic prefill, whatever was done to the conversation before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from click.testing import CliRunner
from daemon import Daemon, reuse_of
from oracle import Oracle, check_greedy

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.cli.main import towerctl

MakeDaemon = Callable[..., Daemon]

SHAPE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)
CUTS = {"lfm2": "boundary", "mamba": "boundary", "gemma3": "anywhere"}
"""Architecture -> where its stored state can be cut: one hybrid, recurrent, sliding-window each."""
WORDS = {
    "boundary": "only where a segment ends with a state checkpoint",
    "anywhere": "cut at any token",
}
WORD_MIN, WORD_MAX = 360, 448
"""Tokens of the synthetic vocabulary that any text of theirs is tokenized to again."""
END = 4
"""<|im_end|>."""
N_REPLY = 8


@dataclass(frozen=True)
class Model:
    """One architecture's file, and what its answers must be."""

    cut: str
    path: Path
    oracle: Oracle

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            "-m",
            str(self.path),
            "-c",
            "1024",
            "-t",
            "1",
            "-tb",
            "1",
            "--checkpoint-tokens",
            "32",
        )


@pytest.fixture(params=list(CUTS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    path = tmp_path / f"{request.param}.gguf"
    make_random_gguf(path, replace(SHAPE, arch=request.param))
    oracle = Oracle(path)
    yield Model(CUTS[request.param], path, oracle)
    oracle.close()


def ctl(*args: object) -> str:
    """towerctl's output."""
    result = CliRunner().invoke(towerctl, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.stdout


def words(n: int, seed: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(WORD_MIN, WORD_MAX, n)]


def message(n: int, seed: int) -> list[int]:
    """What a user says."""
    return [*words(n - 1, seed), END]


class Chat:
    """One conversation, each reply of which is checked."""

    def __init__(self, model: Model, ids: list[int]) -> None:
        self.model = model
        self.ids = ids
        self.session = ""

    def say(self, daemon: Daemon, more: list[int]) -> int:
        """The greedy reply to what was said so far and `more`; how many tokens were reused."""
        prompt = self.ids + more
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": N_REPLY,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
        }
        reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        tokens = reply.json()["tokens"]
        assert len(tokens) == N_REPLY
        check_greedy(self.model.oracle, prompt, tokens)
        self.ids, self.session = prompt + tokens, reply.headers["X-Towerd-Session"]
        reuse = reuse_of(reply.headers)
        assert "approx" not in reuse
        return reuse["live"] + reuse["hot"] + reuse["warm"]

    def copy(self) -> Chat:
        return Chat(self.model, self.ids)


def precache(daemon: Daemon, folder: Path) -> tuple[list[int], list[int], list[Any]]:
    """Two bases, one below the other: their tokens, and what the command says of them."""
    texts = [daemon.post("/detokenize", {"tokens": words(n, n)})["content"] for n in (150, 60)]
    spec = folder / "bases.yaml"
    spec.write_text(
        f"platform:\n  name: p\n  text: {json.dumps(texts[0])}\n"
        f"  communities:\n    - name: c\n      text: {json.dumps(texts[1])}\n"
    )
    at = ("--json", "--socket", daemon.socket)
    first = json.loads(ctl("precache", spec, *at))["bases"]
    assert [base["status"] for base in first] == ["new", "new"]
    found = json.loads(ctl("precache", spec, *at))["bases"]
    assert [base["status"] for base in found] == ["unchanged", "unchanged"]
    ids = [
        daemon.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        for text in (texts[0], texts[0] + texts[1])
    ]
    assert [base["tokens"] for base in found] == [len(each) for each in ids]
    return ids[0], ids[1], found


def check_shown(model: Model, segment: int, *where: object) -> None:
    """What `segments show` says that can be done with a base."""
    shown = json.loads(ctl("segments", "show", segment, "--json", *where))
    assert shown["cut"] == model.cut
    assert (shown["checkpoint_bytes"] > 0) == (model.cut == "boundary")
    text = ctl("segments", "show", segment, *where)
    assert f"{WORDS[model.cut]}\n" in text


@pytest.mark.timeout(300)
def test_through_the_product(model: Model, make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Precached, talked to, frozen, restarted, thawed, exported, imported elsewhere: everything
    continues as if it had been evaluated at once, and from what was stored."""
    one, two = make_daemon(*model.flags, name="a"), make_daemon(*model.flags, name="b")
    at, path = ("--socket", one.socket), tmp_path / "chat.tower"
    with one:
        upper, lower, bases = precache(one, tmp_path)
        chat, other = Chat(model, lower), Chat(model, upper)
        assert chat.say(one, message(40, 1)) >= len(lower)
        assert other.say(one, message(40, 2)) >= len(upper)
        n_known = len(chat.ids) - 1
        assert chat.say(one, message(30, 3)) >= n_known
        assert "frozen, " in ctl("freeze", chat.session, *at)
        assert one.stop() == 0, one.log
        one.start()
        for base in bases:
            check_shown(model, base["segment"], *at)
        assert "thawed" in ctl("thaw", chat.session, *at)
        assert one.session_ids(chat.session) == chat.ids
        session = chat.session
        assert chat.say(one, message(20, 4)) >= len(lower)
        assert chat.session == session
        n_known = len(chat.ids) - 1
        assert chat.say(one, message(20, 5)) >= n_known
        ctl("export", session, "-o", path, *at)
        moved = chat.copy()
        chat.say(one, message(20, 6))
        assert one.stop() == 0, one.log
    check_shown(model, bases[1]["segment"], "--store-dir", one.store_dir)
    with two:
        ctl("import", path, "--socket", two.socket)
        assert two.session_ids(session) == moved.ids
        moved.say(two, message(20, 6))
        assert (moved.ids, moved.session) == (chat.ids, session)
        n_known = len(moved.ids) - 1
        assert moved.say(two, message(20, 7)) >= n_known
        assert two.stop() == 0, two.log
    for daemon in (one, two):
        with daemon.stored():
            pass
