"""2,000 frozen sessions: killed while it freezes and thaws, on other threads, with another mini
model. TOWERD_TEST_COLD=network codes nearly all of them with the mini model."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cold_population import ALL_NETWORK, coder, form_of, name_of, record, said
from store_tools import ROW_IDENTITY

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.codec import container
from towerd.codec.forms import mini
from towerd.codec.prior import file
from towerd.cold import cold_history, freeze, thaw
from towerd.store import Store

N = 2000
N_KILLS = 12
FORMS = {"network", "warm"} if ALL_NETWORK else {"packed", "network", "warm"}
FREEZER = Path(__file__).with_name("freezer.py")


def fill(root: Path) -> None:
    """Every session recorded and frozen. The catalog is not synced meanwhile."""
    with Store.open(root, ROW_IDENTITY) as store, coder(store.tables) as codec:
        store.state.catalog.rows("PRAGMA synchronous = OFF")
        for number in range(N):
            record(store, number)
        for number in range(N):
            freeze(store, codec, name_of(number), form=form_of(number))
        assert store.cold.stats()["frozen_sessions"] == N
        n_own = N * 12 * 4
        assert sum(node.n for node in store.nodes()) * 4 < n_own / 10
        store.gc()


def check(root: Path, n_threads: int = 1) -> set[str]:
    """Every session has exactly its tokens, frozen or not; the forms of the frozen ones."""
    forms = set()
    with Store.open(root, ROW_IDENTITY) as store, coder(store.tables, n_threads) as codec:
        report = store.verify()
        assert report.ok, report.problems
        assert {info.id for info in store.sessions()} == {name_of(n) for n in range(N)}
        for number in range(N):
            name = name_of(number)
            frozen = store.cold.read(name)
            history = cold_history(store, codec, name) or store.history(name)
            assert [history.ids(k).tolist() for k in range(len(history.turns))] == said(number)
            forms.add(container.read(frozen.blob).form.name if frozen is not None else "warm")
    return forms


def kill_somewhere(root: Path, chance: random.Random) -> None:
    """Let it work for a moment, and kill it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    asked = [sys.executable, str(FREEZER), str(root), str(chance.getrandbits(30)), str(N)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.6))
        process.kill()


def thaw_some(root: Path, n_threads: int = 1) -> None:
    """Every fiftieth session, for good."""
    with Store.open(root, ROW_IDENTITY) as store, coder(store.tables, n_threads) as codec:
        for number in range(1, N, 50):
            thaw(store, codec, name_of(number))
            assert store.session_ids(name_of(number)).tolist() == said(number)[-1]


@pytest.mark.timeout(3600 if ALL_NETWORK else 400)
def test_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every kill the store opens and each session is what it was; with another thread count
    and another mini model each still thaws exactly."""
    root = tmp_path / "store"
    fill(root)
    chance = random.Random(7)
    for n in range(N_KILLS):
        kill_somewhere(root, chance)
        if n % 6 == 5:
            assert check(root) >= FORMS
    check(root, n_threads=2)
    monkeypatch.setattr(mini, "PATH", tmp_path / "other.gguf")
    make_random_gguf(mini.PATH, Shape(1, 32, 2, 1, 64, 1, n_ctx_train=64), vocab=file.PATH, seed=1)
    assert check(root) >= FORMS
    thaw_some(root, n_threads=2)
