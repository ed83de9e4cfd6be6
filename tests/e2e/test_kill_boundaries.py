"""kill -9 of a daemon with a hybrid model, at random moments, and damaged states after it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests
from daemon import Daemon, run_towerctl
from oracle import Oracle, check_greedy

from towerd.models.random_gguf import PRESETS, make_random_gguf

N_KILLS = 8
N_CHATS = 3
EVERY = "32"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "lfm2.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=4, arch="lfm2", ftype="F32"))
    return path


@pytest.fixture(scope="module")
def oracle(hybrid: Path) -> Iterator[Oracle]:
    made = Oracle(hybrid)
    yield made
    made.close()


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
    """Flip a bit in one file with a boundary state; its name."""
    path = chance.choice(sorted((daemon.store_dir / "boundaries").glob("*.twb")))
    data = bytearray(path.read_bytes())
    data[chance.choice((3, 20, len(data) - 1))] ^= 16
    path.write_bytes(data)
    return path.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_states_after_kill_at_random_moments(tmp_path: Path, hybrid: Path, oracle: Oracle) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # shown when the test fails
    chance = random.Random(seed)
    flags = ("-m", str(hybrid), "-c", "4096", "-t", "1", "-tb", "1", "--boundary-tokens", EVERY)
    daemon = Daemon(tmp_path, *flags)
    chats = [Chat(seed + n) for n in range(N_CHATS)]
    for _ in range(N_KILLS):
        daemon.start()
        talking = [threading.Thread(target=chat.talk, args=(daemon,)) for chat in chats]
        for thread in talking:
            thread.start()
        time.sleep(chance.uniform(0.1, 1.0))
        daemon.kill()
        for thread in talking:
            thread.join()
    assert sum(bool(chat.ids) for chat in chats) > 0
    with daemon.stored():  # reads every file, states too
        pass
    with daemon.start():
        for chat in chats:
            resume(daemon, oracle, chat)
        assert daemon.stop() == 0
    name = damage(daemon, chance)
    found = run_towerctl(daemon, "verify")
    assert found.returncode == 1
    assert name in found.stdout
    with daemon.start():
        whole = [resume(daemon, oracle, chat) for chat in chats]
        assert sum(whole) >= N_CHATS - 1  # the damaged one at most goes on from an earlier state
        assert daemon.stop() == 0
    assert run_towerctl(daemon, "verify", "--repair").returncode in (0, 1)
    assert run_towerctl(daemon, "verify").returncode == 0
    assert any(path.name == name for path in (daemon.store_dir / "quarantine").iterdir())


def resume(daemon: Daemon, oracle: Oracle, chat: Chat) -> bool:
    """Go on with what was acknowledged: the answer is monolithic prefill's. Returns whether
    nothing of it was evaluated again, but for the last token, which has no rows yet."""
    n_known = max(0, len(chat.ids) - 1)
    prompt = chat.ids + chat.rng.integers(300, 448, 10).tolist()
    reply = daemon.complete(prompt, 5)
    check_greedy(oracle, prompt, reply["tokens"])
    chat.ids = prompt + reply["tokens"]
    return bool(reply["timings"]["cache_n"] >= n_known)
