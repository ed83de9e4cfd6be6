"""What daemons put by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from daemon import Daemon, run_towerctl
from sharing import TALE, ids_of, metric, say
from waiting import until

MakeDaemon = Callable[..., Daemon]


def test_what_cannot_be_put_stops_nothing_else(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """No record of a base can be written: the pinned chat, whose turn comes after it, is put all the same."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / "bases").write_bytes(b"no folder")
    with make_daemon("--shared", f"file://{bucket}", name="a") as daemon:
        daemon.post("/towerd/v1/precache", {"name": "tale", "prompt": TALE, "level": 1})
        session = say(daemon, ids_of(daemon, "Tom had a red ball."))[1]
        assert run_towerctl(daemon, "pin", "--session", session).returncode == 0
        until(lambda: (bucket / "sessions").is_dir() and any((bucket / "sessions").rglob("*-*")))
        assert metric(daemon, "errors_total") >= 1
        assert daemon.stop() == 0
