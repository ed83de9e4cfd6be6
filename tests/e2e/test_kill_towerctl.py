"""kill -9 of towerctl in the middle of what it does to a store that no daemon has open."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import Daemon, clean_env, run_towerctl

from towerd.store import Store

N_CHATS = 4
COMMANDS = {
    "freeze": ("freeze", "--idle", "0s"),
    "thaw": ("thaw", *(f"chat-{n}" for n in range(N_CHATS))),
    "gc": ("gc",),
    "verify": ("verify", "--repair"),
    "import": ("import", "moved.tower"),
}
MOVED = f"chat-{N_CHATS}"
"""The session in moved.tower."""
BEFORE = {
    "thaw": (("freeze", "--idle", "0s"),),
    "gc": (("sessions", "rm", "--yes", MOVED),),
    "import": (("sessions", "rm", "--yes", MOVED),),
}
"""What gives a command something to do."""
DELAY_S_MAX = 3.0
"""The commands take about a second, most of it for loading Python."""


class Kept:
    """A stopped daemon's store, and the tokens of each of its sessions."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.ids: dict[str, list[int]] = {}

    def run(self, *command: str) -> None:
        """Run towerctl to its end."""
        done = run_towerctl(self.daemon, *command)
        assert done.returncode == 0, done.stdout + done.stderr

    def run_and_kill(self, command: tuple[str, ...], delay_s: float) -> None:
        """Run towerctl and kill it after `delay_s`, if it has not ended by then."""
        towerctl = str(Path(sys.executable).with_name("towerctl"))
        root = self.daemon.root
        env = clean_env(root) | {
            "TOWERD_STORE_DIR": str(self.daemon.store_dir),
            "TOWERD_SOCKET": str(self.daemon.socket),
        }
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            [towerctl, *command], env=env, cwd=root, stdout=quiet, stderr=quiet
        ) as run:
            try:
                run.wait(delay_s)
            except subprocess.TimeoutExpired:
                run.kill()

    def check(self) -> None:
        """The store is sound, and every token is there, coded or not."""
        self.run("verify")
        self.run("thaw", *self.ids)
        with self.daemon.stored() as store:
            self.check_ids(store)

    def check_ids(self, store: Store) -> None:
        """The tokens of every session are what its client was told."""
        for name, ids in self.ids.items():
            assert store.session_ids(name).tolist() == ids, name


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    daemon = Daemon(tmp_path_factory.mktemp("kept"))
    kept = Kept(daemon)
    chance = random.Random(1)
    with daemon:
        for n in range(N_CHATS + 1):
            prompt = [1, *(chance.randrange(3, 500) for _ in range(150))]
            name = f"chat-{n}"
            kept.ids[name] = prompt + said(daemon, prompt, name)
        assert daemon.stop() == 0, daemon.log
    kept.run("export", MOVED, "-o", "moved.tower")
    return kept


def said(daemon: Daemon, prompt: list[int], session: str) -> list[int]:
    """The reply that a session was recorded with."""
    body = {"prompt": prompt, "n_predict": 20, "ignore_eos": True, "return_tokens": True}
    tokens = daemon.post("/completion", body, headers={"X-Towerd-Session": session})["tokens"]
    assert isinstance(tokens, list)
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n_kills", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", list(COMMANDS))
def test_kill_in_the_middle(kept: Kept, name: str, n_kills: int) -> None:
    """Whatever it was doing, the store is sound without a repair and has every token."""
    chance = random.Random(f"{name} {n_kills}")
    for _ in range(n_kills):
        for command in BEFORE.get(name, ()):
            kept.run(*command)
        kept.run_and_kill(COMMANDS[name], chance.uniform(0.3, DELAY_S_MAX))
        if name in ("gc", "import"):
            kept.run(*COMMANDS["import"])
        kept.check()
