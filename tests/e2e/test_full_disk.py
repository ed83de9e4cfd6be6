"""A disk without room, and one that cannot be written: clear errors, nothing acknowledged lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, run_towerd
from waiting import until

from lab.models.random_gguf import PRESETS, make_random_gguf

Mount = Callable[..., None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """`mount(path, options)`: a small disk of its own at `path`; skips where that is not
    allowed."""
    mounted: list[Path] = []

    def run(path: Path, options: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode != 0:
            pytest.skip(f"tmpfs cannot be mounted: {done.stderr.strip()}")
        mounted.append(path)

    yield run
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> Path:
    """Write until nothing fits any more; the file that holds the space."""
    filler = path / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        for n_bytes in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    os.write(fd, b"x" * n_bytes)
            except OSError:
                continue
    finally:
        os.close(fd)
    return filler


class Talk:
    """Turns that were acknowledged: session -> tokens."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.kept: dict[str, list[int]] = {}
        self.refused = 0

    def say(self) -> dict[str, Any]:
        """One new session; its reply or its error."""
        name = f"s{len(self.kept)}-{self.refused}"
        prompt = [1] + [3 + (len(self.kept) * 7 + i * i) % 500 for i in range(120)]
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": 40,
            "return_tokens": True,
            "ignore_eos": True,
        }
        reply = requests.post(
            self.daemon.url + "/completion",
            json=body,
            headers={"X-Towerd-Session": name},
            timeout=60,
        )
        answer: dict[str, Any] = reply.json()
        if reply.status_code == 200:
            self.kept[name] = prompt + answer["tokens"]
        else:
            self.refused += 1
            assert reply.status_code == answer["error"]["code"]
        return answer

    def say_until_refused(self) -> dict[str, Any]:
        """The catalog has some room left in its own file: talk until that is used up."""
        for _ in range(500):
            answer = self.say()
            if "error" in answer:
                error: dict[str, Any] = answer["error"]
                return error
        raise AssertionError("a full disk was never noticed")

    def check(self) -> None:
        for name, ids in self.kept.items():
            assert self.daemon.session_ids(name) == ids


def test_full_disk(make_daemon: Callable[..., Daemon], mount: Mount) -> None:
    """A turn that cannot be recorded is an error (507), streamed or not; the daemon lives on,
    and with room again it works. Everything acknowledged is there all the time."""
    daemon = make_daemon()
    mount(daemon.store_dir, "size=8m")
    talk = Talk(daemon)
    with daemon:
        for _ in range(3):
            assert "error" not in talk.say()
        filler = fill(daemon.store_dir)
        error = talk.say_until_refused()
        assert error["code"] == 507
        assert error["type"] == "insufficient_storage_error"
        assert "free disk space" in error["message"]
        check_streamed_error(daemon)
        assert daemon.get("/health") == {"status": "ok"}
        assert daemon.n_processing() == 0
        talk.check()
        filler.unlink()
        for _ in range(3):
            assert "error" not in talk.say()
        talk.check()
        assert daemon.stop() == 0, daemon.log
    assert "Traceback" not in daemon.log
    with daemon.stored() as store:
        for name, ids in talk.kept.items():
            assert store.session_ids(name).tolist() == ids


def check_streamed_error(daemon: Daemon) -> None:
    """After the text the stream says that it was not kept, and nothing claims the opposite."""
    body: dict[str, Any] = {
        "prompt": [1] + [9] * 300,
        "n_predict": 100,
        "stream": True,
        "ignore_eos": True,
    }
    with requests.post(daemon.url + "/completion", json=body, stream=True, timeout=60) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line]
    assert events[-1]["error"]["code"] == 507
    assert not any(event.get("stop") for event in events)


@pytest.mark.parametrize("end", ["kill", "SIGTERM"])
def test_restart_on_a_full_disk(make_daemon: Callable[..., Daemon], mount: Mount, end: str) -> None:
    """Killed or stopped when nothing fits, it may refuse to start until there is room, and says
    so; with room again everything acknowledged is there."""
    daemon = make_daemon()
    mount(daemon.store_dir, "size=8m")
    talk = Talk(daemon)
    with daemon:
        for _ in range(3):
            assert "error" not in talk.say()
        filler = fill(daemon.store_dir)
        talk.say_until_refused()
        if end == "kill":
            daemon.kill()
        else:
            assert daemon.stop() in (0, 1)
        assert "Traceback" not in daemon.log
    daemon.spawn()
    with suppress(AssertionError):
        daemon.wait_ready()
    if daemon.is_running:
        talk.check()
        daemon.kill()
    else:
        assert daemon.wait() == 1
        assert "free disk space" in daemon.log
        assert "Traceback" not in daemon.log
    filler.unlink()
    with daemon.stored() as store:
        for name, ids in talk.kept.items():
            assert store.session_ids(name).tolist() == ids
    with daemon.start():
        assert "error" not in talk.say()
        talk.check()


def test_no_room_to_load_a_model(
    make_daemon: Callable[..., Daemon], mount: Mount, tmp_path: Path
) -> None:
    """A router's model that cannot open the store is a full disk too, in words that name no file."""
    models = tmp_path / "models"
    models.mkdir()
    make_random_gguf(models / "dice.gguf", PRESETS["tiny"])
    router = make_daemon("--models-dir", str(models), "-c", "1024")
    mount(router.store_dir, "size=8m")
    body: dict[str, Any] = {"model": "dice", "prompt": "Once", "n_predict": 4}
    with router:
        filler = fill(router.store_dir)
        refused = router.post("/completion", body, status=507)
        assert "The disk is full" in refused["error"]["message"]
        assert str(tmp_path) not in str(refused)
        filler.unlink()
        until(lambda: requests.post(router.url + "/completion", json=body, timeout=60).ok)
        assert router.stop() == 0


def test_no_room_at_the_start(make_daemon: Callable[..., Daemon], mount: Mount) -> None:
    """A store that cannot even be made: one sentence that says so."""
    daemon = make_daemon()
    mount(daemon.store_dir, "size=64k")
    fill(daemon.store_dir)
    done = run_towerd(
        daemon.root,
        "serve",
        "--port",
        "0",
        "--store-dir",
        str(daemon.store_dir),
        "--socket",
        str(daemon.socket),
    )
    assert done.returncode == 1
    assert "free disk space" in done.stderr
    assert "Traceback" not in done.stderr


def test_read_only_disk(make_daemon: Callable[..., Daemon], mount: Mount) -> None:
    """The directory and the reason."""
    daemon = make_daemon()
    mount(daemon.store_dir, "size=64k,ro")
    done = run_towerd(
        daemon.root,
        "serve",
        "--port",
        "0",
        "--store-dir",
        str(daemon.store_dir),
        "--socket",
        str(daemon.socket),
    )
    assert done.returncode == 1
    assert f"{daemon.store_dir} cannot be used: Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
