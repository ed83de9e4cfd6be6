"""kill -9 under everything that clients do, on models of every kind of memory."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from daemon import Daemon, run_towerctl
from mixed_clients import Killed, MixedClient
from oracle import Oracle, check_greedy

from lab.models.random_gguf import PRESETS, make_random_gguf

N_CLIENTS = 3
VOCABULARY = range(360, 448)
"""Of the synthetic vocabulary: tokens that any text of theirs is tokenized to again."""
SHAPE = replace(PRESETS["tiny"], n_layer=4, ftype="F32", window=48, n_vocab=448, n_ctx_train=2048)
SHAPES = {
    "llama": SHAPE,
    "gemma3": replace(SHAPE, arch="gemma3"),
    "lfm2": replace(SHAPE, arch="lfm2"),
    "mamba": replace(SHAPE, arch="mamba"),
    "deepseek2": replace(SHAPE, arch="deepseek2", head_dim=64),
}
"""Dense, sliding-window, hybrid, recurrent, and MLA."""
FLAGS = ("-c", "1024", "-t", "1", "-tb", "1", "--checkpoint-tokens", "32", "--freeze-after", "0")
SOAK_KILLS = 20
WORK_S = (0.3, 1.0, 3.0, 8.0)
"""The most time between two kills; freezing needs seconds, for the codec is loaded first."""


def kill_in_the_middle(daemon: Daemon, clients: list[MixedClient], after_s: float) -> None:
    """Let the clients work, and kill the daemon after a while."""
    is_over = threading.Event()
    with ThreadPoolExecutor(len(clients)) as pool:
        working = [pool.submit(each.run, is_over) for each in clients]
        time.sleep(after_s)
        daemon.kill()
        is_over.set()
        for each in working:
            each.result()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("arch", "n_kills", "seed"),
    [
        pytest.param("mamba", 3, 1, id="mamba"),
        *(
            pytest.param(
                arch,
                SOAK_KILLS,
                random.SystemRandom().getrandbits(32),
                marks=pytest.mark.soak,
                id=f"soak-{arch}",
            )
            for arch in SHAPES
        ),
    ],
)
def test_kill_under_mixed_operations(tmp_path: Path, arch: str, n_kills: int, seed: int) -> None:
    """What was acknowledged is there and what was deleted is gone, after each kill; the next answers
    are those of monolithic prefill, and the store is sound."""
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    model = tmp_path / f"{arch}.gguf"
    make_random_gguf(model, SHAPES[arch])
    oracle = Oracle(model)
    daemon = Daemon(tmp_path / "d", "-m", str(model), *FLAGS)
    clients = [MixedClient(daemon, seed + 1 + n, VOCABULARY) for n in range(N_CLIENTS)]
    try:
        for n in range(n_kills):
            daemon.start()
            for each in clients:
                each.check()
            check_an_answer(oracle, clients, chance)
            kill_in_the_middle(daemon, clients, chance.choice(WORK_S) * chance.random())
            if n % 10 == 9:
                with daemon.stored():  # as the kill left it
                    pass
                print(f"{arch}: {n + 1} of {n_kills} kills", flush=True)
        with daemon.start():
            for each in clients:
                each.check()
            assert daemon.stop() == 0, daemon.log
    finally:
        oracle.close()
        if daemon.process is not None:
            daemon.kill()
    done = run_towerctl(daemon, "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    n_done = sum(sum(each.done.values()) for each in clients)
    print(f"{arch}: {n_done} operations besides begun sessions", flush=True)
    assert n_done > n_kills  # otherwise nothing was tried


def check_an_answer(oracle: Oracle, clients: list[MixedClient], chance: random.Random) -> None:
    """Continue one of the sessions."""
    client = chance.choice(clients)
    alive = [each for each in client.sessions if each.ids and not each.is_deleted]
    if not alive:
        return
    try:
        prompt, reply = client.next_answer(chance.choice(alive))
    except Killed as error:
        raise AssertionError("the daemon ended") from error
    check_greedy(oracle, prompt, reply)
