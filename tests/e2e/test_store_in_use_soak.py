"""The long attack on a store in use: offline commands and a second daemon beside the first, clocks
that jump by years, few file descriptors, little memory. What was acknowledged stays, answers are
right, and deleted conversations stay away."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, run_towerctl, run_towerd
from oracle import Oracle, check_greedy

from towerd.models.bundled import bundled_model

FLAGS = (
    "-m",
    str(bundled_model()),
    "-c",
    "1024",
    "--live-tokens",
    "2048",
    "--checkpoint-tokens",
    "64",
)
N_CHATS = 6
KEPT = "kept"
"""A chat that is never deleted."""
YEAR_S = 365 * 86_400
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static long long offset_s(void) {
    static volatile long long *at;
    if (!at) {
        int fd = open(getenv("CLOCK_OFFSET"), O_RDONLY);
        at = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
    }
    return *at;
}
int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += offset_s();
    return status;
}
int gettimeofday(struct timeval *t, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int status = real(t, zone);
    t->tv_sec += offset_s();
    return status;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""


class Chats:
    """Conversations of a daemon, and what was acknowledged of them."""

    def __init__(self, daemon: Daemon, seed: int = 1) -> None:
        self.daemon = daemon
        self.chance = random.Random(seed)
        self.ids: dict[str, list[int]] = {}
        self.replies: list[tuple[list[int], list[int]]] = []
        self.deleted: set[str] = set()
        self.refused = 0
        self._n = 0

    def say(self, name: str) -> None:
        """One more turn; a refusal (a 5xx) is counted, and loses nothing."""
        prompt = self.ids.get(name, [1]) + [self.chance.randrange(300, 440) for _ in range(30)]
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": 5,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
        }
        headers = {"X-Towerd-Session": name}
        url = self.daemon.url + "/completion"
        reply = requests.post(url, json=body, headers=headers, timeout=120)
        if reply.status_code >= 500:
            self.refused += 1
            return
        assert reply.status_code == 200, reply.text
        tokens = reply.json()["tokens"]
        self.replies.append((prompt, tokens))
        self.ids[name] = prompt + tokens

    def round(self) -> None:
        """One more turn of most chats; one is begun, one deleted."""
        self._n += 1
        names = sorted(self.ids.keys() - {KEPT})
        if len(names) >= N_CHATS:
            gone = names.pop(self.chance.randrange(len(names)))
            reply = requests.delete(f"{self.daemon.url}/towerd/v1/sessions/{gone}", timeout=60)
            if reply.status_code == 200:
                del self.ids[gone]
                self.deleted.add(gone)
        for name in [*names[:3], f"chat-{self._n}"]:
            if len(self.ids.get(name, [])) < 700:
                self.say(name)

    def check(self) -> None:
        """In a store that no daemon has open: all that was acknowledged and nothing that was
        deleted. A turn that was refused may have been recorded."""
        with self.daemon.stored() as store:
            there = {info.id for info in store.sessions()}
            assert not there & self.deleted
            for name, ids in self.ids.items():
                assert store.session_ids(name).tolist()[: len(ids)] == ids, name

    def check_answers(self, oracle: Oracle, n: int = 12) -> None:
        """Some answers are those of monolithic prefill."""
        for prompt, tokens in self.chance.sample(self.replies, min(n, len(self.replies))):
            check_greedy(oracle, prompt, tokens)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(bundled_model())
    yield made
    made.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_commands_and_a_second_daemon_beside_it(tmp_path: Path, oracle: Oracle) -> None:
    """Commands reach the daemon, or are refused while it has the store; none harms it."""
    daemon = Daemon(tmp_path / "daemon", *FLAGS)
    with daemon.start():
        chats = Chats(daemon)
        for _ in range(N_CHATS):
            chats.round()
        chats.say(KEPT)
        commands: list[tuple[str, ...]] = [
            ("gc",),
            ("verify",),
            ("freeze", KEPT),
            ("export", KEPT, "-o", str(tmp_path / "kept.tower"), "--force"),
            ("import", str(tmp_path / "kept.tower")),
            ("sessions", "ls"),
        ]
        over = threading.Event()
        results: list[tuple[tuple[str, ...], Any]] = []

        def run() -> None:
            while not over.is_set():
                for command in commands:
                    results.append((command, run_towerctl(daemon, *command)))

        beside = threading.Thread(target=run)
        beside.start()
        try:
            ended = time.monotonic() + 60
            while time.monotonic() < ended:
                chats.round()
            where = ("--port", "0", "--store-dir", str(daemon.store_dir), "--socket", "2.sock")
            second = run_towerd(tmp_path, "serve", *where, *FLAGS)
            assert second.returncode != 0
            assert f"process {daemon.pid}" in second.stdout + second.stderr
        finally:
            over.set()
            beside.join()
        for _, done in results:
            text = done.stdout + done.stderr
            assert "Traceback" not in text, text
            assert done.returncode == 0 or "busy" in text or "in use" in text, text
        assert len(results) >= len(commands)
        assert daemon.stop() == 0
    chats.check()
    chats.check_answers(oracle)
    assert chats.refused == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_clocks_that_jump_by_years(tmp_path: Path, oracle: Oracle) -> None:
    """Forward and back, while it runs and between starts: nothing is lost, deleted ones stay away,
    and the daemon answers."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, shim, offset = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "offset"
    source.write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    offset.write_bytes(bytes(8))

    def jump(years: float) -> None:
        with offset.open("r+b") as file:
            file.write(int(years * YEAR_S).to_bytes(8, "little", signed=True))

    env = {"LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(offset)}
    daemon = Daemon(tmp_path / "daemon", *FLAGS, "--freeze-after", "1", env=env)
    chats = Chats(daemon)
    for years in (0.0, 9.0, -20.0, 0.0, 60.0, 0.0):
        with daemon.start():
            for step in (years, -years, years / 2, 0.0):
                jump(step)
                chats.round()
                assert daemon.get("/towerd/v1/sessions")["sessions"]
                daemon.post("/towerd/v1/gc", {})
            jump(years)
            assert daemon.stop() == 0
        chats.check()
    chats.check_answers(oracle)
    assert chats.refused == 0


def limited(what: int, limit: Callable[[int], int]) -> Callable[[Daemon], None]:
    """Sets a limit of a running daemon: from then on, as for a program that was started so."""

    def set_limit(daemon: Daemon) -> None:
        n = limit(daemon.pid)
        resource.prlimit(daemon.pid, what, (n, n))

    return set_limit


def little_memory(pid: int) -> int:
    """What it has, and 48 MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize() + (48 << 20)


LIMITS = {
    "64 descriptors": limited(resource.RLIMIT_NOFILE, lambda pid: 64),
    "little memory": limited(resource.RLIMIT_AS, little_memory),
}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", LIMITS)
def test_few_resources(tmp_path: Path, oracle: Oracle, what: str) -> None:
    """Many clients at once meet refusals at most; nothing acknowledged is lost or wrong, and with
    the limit gone all is as before."""
    if not hasattr(resource, "prlimit"):
        pytest.skip("limits of a running process are Linux's")
    daemon = Daemon(tmp_path / "daemon", *FLAGS)
    with daemon.start():
        chats = [Chats(daemon, seed) for seed in range(8)]
        with ThreadPoolExecutor(
            len(chats)
        ) as pool:  # glibc aborts where a new thread finds no memory
            list(pool.map(lambda n: chats[n].say(f"chat-{n}-0"), range(len(chats))))
        LIMITS[what](daemon)

        def talk(number: int) -> None:
            for turn in range(12):
                try:
                    chats[number].say(f"chat-{number}-{turn % 4}")
                except requests.ConnectionError:
                    chats[number].refused += 1

        threads = [threading.Thread(target=talk, args=(n,)) for n in range(len(chats))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert daemon.is_running, daemon.log[-4000:]
        daemon.stop()
    merged = Chats(daemon)
    merged.ids = {name: ids for each in chats for name, ids in each.ids.items()}
    merged.replies = [reply for each in chats for reply in each.replies]
    merged.check()
    merged.check_answers(oracle)
    with daemon.start():
        for name in list(merged.ids)[:4]:
            merged.say(name)
        assert merged.refused == 0
        assert daemon.stop() == 0
    merged.check()
