"""kill -9 of a daemon whose chats have a live budget, with windows or a recurrent state beside the
layers that are thinned, while rows that may be recalled are written to files."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, run_towerctl
from oracle import Oracle, check_greedy
from unnamed import HAS_PROC
from waiting import until

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Shape

EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off", "-t", "1", "-tb", "1")
SCOPES = ("layer", "head")
N_STORED = 200


def some_ids(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(260, 500) for _ in range(n)]


def offloaded_bytes(daemon: Daemon) -> int:
    """Size of the unnamed files that the daemon has open, where that can be seen."""
    found = 0
    for link in Path(f"/proc/{daemon.pid}/fd").glob("*"):
        try:
            if os.readlink(link).endswith("(deleted)"):
                found += link.stat().st_size
        except FileNotFoundError:
            continue
    return found


def talk(daemon: Daemon, prompt: list[int], scope: str, heard: dict[str, int]) -> None:
    """Read a reply without an end until the daemon is gone."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": 10**5, "ignore_eos": True}
    try:
        with requests.post(
            daemon.url + "/completion",
            json=body | {"stream": True, "retention_scope": scope},
            stream=True,
            timeout=120,
        ) as reply:
            for line in reply.iter_lines():
                heard[scope] += bool(line)
    except requests.RequestException:
        return  # killed


def has_rows_on_disk(daemon: Daemon) -> bool:
    """Whether all rows that have been recorded are in files."""
    if daemon.get("/towerd/v1/stats")["tiers"]["unwritten_segments"]:
        return False
    segments = daemon.get("/towerd/v1/segments")["segments"]
    n_warm = sum(int(each["p1"]) - int(each["p0"]) for each in segments if each["warm"])
    return n_warm >= 2 * N_STORED - 2


def answers(daemon: Daemon, oracle: Oracle, prompts: dict[str, list[int]]) -> None:
    """What is stored brings the answers that a prompt brings which is read anew."""
    for scope, prompt in prompts.items():
        stored = daemon.complete(prompt, retention_scope=scope)
        assert stored["timings"]["cache_n"] >= N_STORED - 1
        anew = daemon.complete(prompt, retention_scope=scope, cache_prompt=False)
        assert anew["timings"]["cache_n"] == 0
        assert stored["tokens"] == anew["tokens"]
        whole = daemon.complete(prompt, retention="none")
        check_greedy(oracle, prompt, whole["tokens"])


@pytest.mark.parametrize(("arch", "policy"), [("gemma3", "icecache"), ("qwen35", "snapkv")])
def test_a_kill_while_budgets_hold(tmp_path: Path, arch: Any, policy: str) -> None:
    """Nothing but the stored chats is left, and these are whole."""
    path = tmp_path / "model.gguf"
    shape = Shape(4, 128, 4, 2, 128, 512, n_ctx_train=2048, rope_freq_base=1e4, ftype="F32")
    make_random_gguf(path, replace(shape, arch=arch, window=24))
    budget = ("-c", "400", "--retention", policy, "--live-budget", "48", "--recall-every", "8")
    daemon = Daemon(tmp_path / "d", "-m", str(path), "-np", "2", *budget, *EXACT)
    prompts = {scope: some_ids(N_STORED, seed) for seed, scope in enumerate(SCOPES)}
    with daemon:
        for scope, prompt in prompts.items():
            reply = daemon.complete(prompt, 6, retention_scope=scope)
            prompts[scope] = prompt + reply["tokens"] + some_ids(60, 7)
        until(lambda: has_rows_on_disk(daemon))
        heard = dict.fromkeys(SCOPES, 0)
        talking = [
            threading.Thread(target=talk, args=(daemon, prompt, scope, heard))
            for scope, prompt in prompts.items()
        ]
        for thread in talking:
            thread.start()
        until(lambda: min(heard.values()) > 60)  # beyond the first choices of both
        before = offloaded_bytes(daemon)
        if policy == "icecache" and HAS_PROC:
            until(lambda: offloaded_bytes(daemon) != before)
        daemon.kill()
        for thread in talking:
            thread.join()
    assert not [each for each in daemon.store_dir.rglob("*") if each.name.startswith("pages-")]
    found = run_towerctl(daemon, "verify")
    assert found.returncode == 0, found.stdout
    oracle = Oracle(path)
    with daemon:
        answers(daemon, oracle, prompts)
        assert daemon.stop() == 0
    oracle.close()
    assert run_towerctl(daemon, "verify").returncode == 0
