"""What people delete from the store that daemons share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon import Daemon, run_towerctl
from s3_server import S3Server, s3_server
from sharing import TALE, Place, ids_of, metric, say, shared

MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "server") as server:
        yield server


def age(folder: Path, seconds: float) -> None:
    """Make all objects older."""
    for path in folder.rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


def test_a_chat_is_deleted_there(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Its record at once, its rows by a gc an hour after they were found; what another chat needs stays."""
    bucket = tmp_path / "bucket"
    with make_daemon("--shared", f"file://{bucket}", name="a") as daemon:
        base = ids_of(daemon, TALE)
        chats = [say(daemon, [*base, last])[1] for last in (50, 51)]
        for chat in chats:
            shared(daemon, "push", chat)
        done = run_towerctl(daemon, "shared", "rm", chats[0])
        assert done.stdout.startswith(f"Deleted session {chats[0]} from the shared store")
        assert run_towerctl(daemon, "shared", "pull", chats[0]).returncode == 1
        age(bucket, 4000)
        seen = shared(daemon, "gc", "--dry-run")
        assert seen["waiting_objects"] >= 1
        objects = (
            "1 object" if seen["waiting_objects"] == 1 else f"{seen['waiting_objects']} objects"
        )
        said = run_towerctl(daemon, "shared", "gc", "--dry-run").stdout
        assert said.startswith(f"0 records would be deleted; {objects} (")
        for _ in range(2):  # the daemon's own run may be one of those that delete
            shared(daemon, "gc")
            age(bucket, 4000)
        assert shared(daemon, "gc")["waiting_objects"] == 0
        assert metric(daemon, "deleted_total") == 1 + seen["waiting_objects"]
        said = run_towerctl(daemon, "sessions", "rm", "-y", chats[1]).stdout
        assert said.endswith("stays there: towerctl shared rm deletes it.\n")
        taken = shared(daemon, "pull", chats[1])
        assert taken["rows"] == taken["tokens"] - 1
        said = run_towerctl(daemon, "sessions", "rm", "-y", "--shared", chats[1]).stdout
        assert said.count("\n") == 1
        for _ in range(3):
            age(bucket, 4000)
            shared(daemon, "gc")
        left = {path.relative_to(bucket).parts[0] for path in bucket.rglob("*") if path.is_file()}
        assert left <= {"gc"}
        assert metric(daemon, "errors_total") == 0
        assert daemon.stop() == 0


def test_on_a_real_server(make_daemon: MakeDaemon, s3: S3Server) -> None:
    """What is in use stays; records that two later ones contain go at once."""
    place = Place(s3.url, s3.env)
    with make_daemon(*place.flags(), name="a", **place.env) as daemon:
        prompt = ids_of(daemon, TALE)
        reply, chat, _ = say(daemon, prompt)
        shared(daemon, "push", chat)
        more, _, _ = say(daemon, [*prompt, *reply, 13])
        shared(daemon, "push", chat)
        say(daemon, [*prompt, *reply, 13, *more, 13])
        pushed = shared(daemon, "push", chat)
        done = shared(daemon, "gc", "--older-than", "30d")
        assert done["records"] == 1
        assert shared(daemon, "gc")["records"] == 0
        taken = shared(daemon, "pull", chat)
        assert (taken["tokens"], taken["added"]) == (pushed["tokens"], 0)
        assert shared(daemon, "rm", chat)["records"] == 2
        assert shared(daemon, "rm", chat)["records"] == 0
        refused = run_towerctl(daemon, "shared", "gc", "--older-than", "1d")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert run_towerctl(daemon, "shared", "gc", "--older-than", "soon").returncode == 2
        assert metric(daemon, "errors_total") == 0
        assert daemon.stop() == 0


def test_what_a_daemon_puts_again_is_told(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """A pinned chat, and a base, which may be everybody's."""
    with make_daemon("--shared", f"file://{tmp_path}/bucket", name="a") as daemon:
        daemon.post("/towerd/v1/precache", {"name": "tale", "prompt": TALE, "public": True})
        _, chat, _ = say(daemon, [*ids_of(daemon, TALE), 50])
        assert run_towerctl(daemon, "pin", "--session", chat).returncode == 0
        shared(daemon, "push", chat)
        shared(daemon, "push", "--base", "tale")
        done = run_towerctl(daemon, "shared", "rm", chat).stdout
        said = "since it is pinned here: towerctl unpin with a segment that towerctl pin lists ends that.\n"
        assert done.endswith(said)
        done = run_towerctl(daemon, "shared", "rm", "--base", "tale").stdout
        assert done.startswith("Deleted base tale from the shared store")
        assert done.endswith("since it is a base here: towerctl unpin --base tale ends that.\n")
        assert shared(daemon, "list")["bases"] == []
        assert run_towerctl(daemon, "unpin", "--session", chat).returncode == 0
        assert run_towerctl(daemon, "unpin", "--base", "tale").returncode == 0
        assert not shared(daemon, "rm", chat)["puts_again"]
        assert not shared(daemon, "rm", "--base", "tale")["puts_again"]
        assert daemon.stop() == 0
