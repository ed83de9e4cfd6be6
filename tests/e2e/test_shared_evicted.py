"""A disk that is too small for all chats: what leaves it comes back from the bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import requests
from daemon import Daemon
from sharing import TALE, ids_of, metric, say
from waiting import until

MakeDaemon = Callable[..., Daemon]
WARM = "640KiB"
"""Two of the chats fit, of which the second is in the fifth that is left free."""


def evictions(daemon: Daemon) -> int:
    stats = requests.get(daemon.url + "/towerd/v1/stats", timeout=30).json()
    return int(stats["tiers"]["warm_evictions"])


def test_an_evicted_chat_comes_back(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """It was put before it was evicted: after a restart it continues with nothing evaluated again."""
    flags = ["--shared", f"file://{tmp_path}/bucket", "--fidelity", "exact"]
    flags += ["--policy", "lru", "--hot-bytes", "0", "--warm-bytes", WARM]
    with make_daemon(*flags, name="a") as daemon:
        prompt = ids_of(daemon, TALE)
        first = [*prompt, *say(daemon, prompt)[0]]
        for token in (50, 60):
            say(daemon, [token, *prompt])
            until(lambda: metric(daemon, "saved_total") >= 1)
        until(lambda: evictions(daemon) >= 1)
        assert metric(daemon, "errors_total") == 0
        assert daemon.stop() == 0
        daemon.start()
        tokens, _, reuse = say(daemon, [*first, 13])
        assert reuse == {"live": 0, "hot": 0, "warm": len(first) - 1, "prefill": 2}
        assert metric(daemon, "lookups_found_total") == 1
        assert len(tokens) == 8
        assert daemon.stop() == 0
    with daemon.stored():
        pass
