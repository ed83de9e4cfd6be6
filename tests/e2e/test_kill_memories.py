"""kill -9 of a daemon with a hybrid, recurrent or sliding-window model, and damaged states."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import requests
from daemon import Daemon, run_towerctl
from oracle import Oracle, check_greedy

from lab.models.random_gguf import PRESETS, make_random_gguf

N_CHATS = 3
EVERY = "32"
ARCHS = ("lfm2", "mamba", "gemma3")
"""A hybrid, a recurrent and a sliding-window model."""
SHAPE = replace(PRESETS["tiny"], n_layer=4, ftype="F32", window=48)


@dataclass(frozen=True)
class Model:
    """A model file, and what its answers must be."""

    path: Path
    oracle: Oracle

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            "-m",
            str(self.path),
            "-c",
            "4096",
            "-t",
            "1",
            "-tb",
            "1",
            "--checkpoint-tokens",
            EVERY,
        )


@pytest.fixture(params=ARCHS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    path = tmp_path / f"{request.param}.gguf"
    make_random_gguf(path, replace(SHAPE, arch=request.param))
    oracle = Oracle(path)
    yield Model(path, oracle)
    oracle.close()


class Chat:
    """Extends one conversation turn by turn until the daemon is gone."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ids: list[int] = []
        """Acknowledged."""

    def talk(self, daemon: Daemon) -> None:
        try:
            while True:
                prompt = self.ids + self.rng.integers(300, 448, 40).tolist()
                self.ids = prompt + daemon.complete(prompt, 5)["tokens"]
        except (requests.RequestException, AssertionError):
            return  # killed


def damage(daemon: Daemon, chance: random.Random) -> str:
    """Flip a bit in one file with a state checkpoint; its name."""
    path = chance.choice(sorted((daemon.store_dir / "boundaries").glob("*.twb")))
    data = bytearray(path.read_bytes())
    data[chance.choice((3, 20, len(data) - 1))] ^= 16
    path.write_bytes(data)
    return path.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_at_random_moments(tmp_path: Path, model: Model) -> None:
    """Every acknowledged token is there, and answers are those of monolithic prefill."""
    daemon, chats = killed(tmp_path, model, 3, seed=1)
    assert sum(bool(chat.ids) for chat in chats) > 0
    with daemon.stored():  # reads every file, states too
        pass
    with daemon.start():
        for chat in chats:
            resume(daemon, model.oracle, chat)
        assert daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["lfm2"], indirect=True)
def test_a_damaged_state_after_a_kill(tmp_path: Path, model: Model) -> None:
    """It is found, passed over by requests, and set aside by a repair."""
    seed = 2
    daemon, chats = killed(tmp_path, model, 1, seed)
    with daemon.start():
        for chat in chats:
            resume(daemon, model.oracle, chat)
        assert daemon.stop() == 0
    name = damage(daemon, random.Random(seed))
    found = run_towerctl(daemon, "verify")
    assert found.returncode == 1
    assert name in found.stdout
    with daemon.start():
        whole = [resume(daemon, model.oracle, chat) for chat in chats]
        assert sum(whole) >= N_CHATS - 1  # the damaged one at most starts from an earlier state
        assert daemon.stop() == 0
    assert run_towerctl(daemon, "verify", "--repair").returncode in (0, 1)
    assert run_towerctl(daemon, "verify").returncode == 0
    assert any(path.name == name for path in (daemon.store_dir / "quarantine").iterdir())


def killed(root: Path, model: Model, n_kills: int, seed: int) -> tuple[Daemon, list[Chat]]:
    """A daemon that was killed `n_kills` times at work, and what its clients know."""
    chance = random.Random(seed)
    daemon = Daemon(root, *model.flags)
    chats = [Chat(seed + n) for n in range(N_CHATS)]
    for _ in range(n_kills):
        daemon.start()
        talking = [threading.Thread(target=chat.talk, args=(daemon,)) for chat in chats]
        for thread in talking:
            thread.start()
        time.sleep(chance.uniform(0.1, 1.0))
        daemon.kill()
        for thread in talking:
            thread.join()
    return daemon, chats


def resume(daemon: Daemon, oracle: Oracle, chat: Chat) -> bool:
    """Continue from what was acknowledged: the answer is monolithic prefill's. Returns whether
    nothing of it was evaluated again, but for the last token, which has no rows yet."""
    n_known = max(0, len(chat.ids) - 1)
    prompt = chat.ids + chat.rng.integers(300, 448, 10).tolist()
    reply = daemon.complete(prompt, 5)
    check_greedy(oracle, prompt, reply["tokens"])
    chat.ids = prompt + reply["tokens"]
    return bool(reply["timings"]["cache_n"] >= n_known)
