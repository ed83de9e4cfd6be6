"""An encrypted store of a real daemon: what is on the disk tells nothing, also after a kill; what is forgotten cannot be
read from copies of the disk, even with the key that opens the store."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon, run_towerctl, wait_until_written
from waiting import until

MakeDaemon = Callable[..., Daemon]
WORDS = ("quixotemango", "wolframpickle", "zanzibarfish")


def ask(daemon: Daemon, system: str, question: str) -> dict[str, int]:
    said = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": said, "max_tokens": 8, "temperature": 0}
    reply = daemon.post("/v1/chat/completions", body)
    timings: dict[str, int] = reply["timings"]
    return timings


def ids_of(daemon: Daemon, text: str) -> bytes:
    """The token ids in the middle of a text, as the store has them."""
    reply = daemon.post("/tokenize", {"content": text})
    return np.array(reply["tokens"][1:-1], np.int32).tobytes()


def found_in(root: Path, needles: list[bytes]) -> list[str]:
    """The files that have any of these bytes."""
    pattern = re.compile(b"|".join(map(re.escape, needles)))
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path.name for path in files if pattern.search(path.read_bytes())]


def towerctl(daemon: Daemon, *args: str) -> str:
    done = run_towerctl(daemon, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("is_plain", [False, True], ids=["encrypted", "plain"])
def test_no_word_and_no_token_is_on_the_disk(
    make_daemon: MakeDaemon, tmp_path: Path, is_plain: bool
) -> None:
    """The plain store shows that the search finds what is there."""
    flags = [] if is_plain else ["--encrypt", f"file:{tmp_path / 'key'}"]
    daemon = make_daemon("--search", *flags).start()
    for word in WORDS[:2]:
        ask(daemon, f"You keep a {WORDS[2]}.", f"Tell me of the {word} and all its friends")
    wait_until_written(daemon)
    needles = [word.encode() for word in WORDS]
    needles.append(ids_of(daemon, "Tell me of the quixotemango and all its friends"))
    assert bool(found_in(daemon.store_dir, needles)) == is_plain
    daemon.kill()
    assert bool(found_in(daemon.store_dir, needles)) == is_plain
    daemon.start()  # also without --encrypt it would be what it is
    again = ask(
        daemon, f"You keep a {WORDS[2]}.", "Tell me of the quixotemango and all its friends"
    )
    assert again["prompt_n"] <= 2
    daemon.stop()
    assert bool(found_in(daemon.store_dir, needles)) == is_plain


def test_a_plain_store_is_encrypted_at_the_next_start(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    plain = make_daemon("--search").start()
    ask(plain, f"You keep a {WORDS[2]}.", f"Tell me of the {WORDS[0]}")
    wait_until_written(plain)
    needles = [word.encode() for word in WORDS]
    needles.append(ids_of(plain, f"Tell me of the {WORDS[0]}"))
    plain.kill()
    assert found_in(plain.store_dir, needles)
    daemon = make_daemon("--search", "--encrypt", f"file:{tmp_path / 'key'}").start()
    assert not found_in(daemon.store_dir, needles)
    assert ask(daemon, f"You keep a {WORDS[2]}.", f"Tell me of the {WORDS[0]}")["prompt_n"] <= 2
    found = towerctl(daemon, "search", WORDS[0], "--json")
    assert WORDS[0] in found
    daemon.kill()
    unkeyed = make_daemon(name="d")
    unkeyed.flags = ()
    unkeyed.start()  # the store says where its key is
    assert ask(unkeyed, f"You keep a {WORDS[2]}.", f"Tell me of the {WORDS[0]}")["prompt_n"] <= 2
    unkeyed.stop()


def test_killed_while_it_is_encrypted(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """At whatever point: the next start continues, and has all."""
    daemon = make_daemon("--search").start()
    for i in range(3):
        ask(daemon, f"You keep a {WORDS[2]}.", f"Tell me of the {WORDS[0]} number {i}")
    wait_until_written(daemon)
    daemon.stop()
    whole = tmp_path / "whole"
    shutil.copytree(daemon.store_dir, whole)
    script = (
        "import os, sys; from towerd.store import Store, latest_row_identity\n"
        "left = int(sys.argv[3])\n"
        "def count(event, args):\n"
        "    global left\n"
        "    if event in ('os.rename', 'os.remove') and args[0] and sys.argv[1] in str(args[0]):\n"
        "        left -= 1\n"
        "        if left < 0: os._exit(9)\n"
        "sys.addaudithook(count)\n"
        "Store.open(sys.argv[1], latest_row_identity, encrypt=sys.argv[2]).close()\n"
    )
    key, n_killed = f"file:{tmp_path / 'key'}", 0
    for point in range(0, 40, 3):
        shutil.rmtree(daemon.store_dir)
        shutil.copytree(whole, daemon.store_dir)
        command = [sys.executable, "-c", script, str(daemon.store_dir), key]
        status = subprocess.run([*command, str(point)], timeout=120).returncode
        n_killed += status == 9
        assert subprocess.run([*command, "1000000"], timeout=120).returncode == 0
        assert not found_in(daemon.store_dir, [word.encode() for word in WORDS])
        listed = towerctl(daemon, "sessions", "ls", "--json")
        assert listed.count('"leaf"') == 3
        if status == 0:
            break
    assert n_killed >= 3


def test_what_is_forgotten_cannot_be_read_from_a_copy(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """A copy of the disk from before, beside the keys from after."""
    daemon = make_daemon("--search", "--encrypt", f"file:{tmp_path / 'key'}").start()
    for word in WORDS[:2]:
        ask(daemon, f"You keep a {WORDS[2]}.", f"Tell me of the {word} and all its friends")
    wait_until_written(daemon)
    before = tmp_path / "before"
    shutil.copytree(daemon.store_dir, before)
    listed = daemon.get("/towerd/v1/sessions")["sessions"]
    (session,) = (each["id"] for each in listed if WORDS[0] in each["title"])
    said = towerctl(daemon, "forget", session, "--yes")
    assert "Forgot 1 session;" in said
    assert "keys that they were encrypted with are destroyed" in said
    left = daemon.get("/towerd/v1/sessions")["sessions"]
    assert [WORDS[1] in each["title"] for each in left] == [True]
    until(lambda: daemon.get(f"/towerd/v1/search?q={WORDS[0]}")["results"] == [])
    until(lambda: len(daemon.get(f"/towerd/v1/search?q={WORDS[1]}")["results"]) == 1)
    assert (
        ask(daemon, f"You keep a {WORDS[2]}.", f"Tell me of the {WORDS[1]} and all its friends")[
            "prompt_n"
        ]
        <= 2
    )
    daemon.kill()
    for name in ("keys.json", "keys.copy"):
        shutil.copy(daemon.store_dir / name, before / name)
    shutil.rmtree(daemon.store_dir)
    before.rename(daemon.store_dir)
    daemon.spawn()
    assert daemon.wait() != 0
    assert WORDS[0] not in daemon.log
    assert "Traceback" not in daemon.log


def test_a_wrong_or_lost_key_is_a_sentence(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    key = tmp_path / "key"
    daemon = make_daemon("--encrypt", f"file:{key}").start()
    ask(daemon, "You are kind.", "Hello")
    daemon.stop()
    sound, kept = key.read_text(), found_in(daemon.store_dir, [b"TWRSEAL"])
    for wrong in (secrets.token_hex(32), "no key", None):
        key.unlink()
        if wrong is not None:
            key.write_text(wrong)
        daemon.spawn()
        assert daemon.wait() != 0
        (error,) = (line for line in daemon.log.splitlines() if line.startswith("Error: "))
        assert str(key) in error
        assert "Traceback" not in daemon.log
        key.touch()
    assert found_in(daemon.store_dir, [b"TWRSEAL"]) == kept
    key.write_text(sound)
    daemon.start()
    assert ask(daemon, "You are kind.", "Hello")["cache_n"] > 0
    daemon.stop()


def test_forgetting_at_once_and_while_a_reply_is_generated(
    make_daemon: MakeDaemon, tmp_path: Path, slow_model: Path
) -> None:
    """Several at once destroy no key in use; what a running reply needs goes when it has ended."""
    daemon = make_daemon("-m", str(slow_model), "--encrypt", f"file:{tmp_path / 'key'}").start()
    kept = [*range(10, 110)]

    def say(session: str, ids: list[int], n: int) -> None:
        body = {"prompt": ids, "n_predict": n, "ignore_eos": True}
        daemon.post("/completion", body, headers={"X-Towerd-Session": session})

    say("kept", kept, 8)
    say("gone", [*range(200, 300)], 8)
    with ThreadPoolExecutor(5) as pool:
        running = pool.submit(say, "gone", [*range(200, 320)], 60)
        until(lambda: daemon.n_processing() > 0)
        each = {"id": "gone", "scope": "local"}
        asked = [
            pool.submit(daemon.post, "/towerd/v1/forget", {"sessions": [each]}) for _ in range(4)
        ]
        said = [each.result()["forgot"] for each in asked]
        running.result()
    assert sorted(each["sessions"] for each in said) == [0, 0, 0, 1]
    assert [each["held"] for each in said] == [0] * 4
    segments = daemon.get("/towerd/v1/segments")["segments"]
    assert sum(each["p1"] - each["p0"] for each in segments) < 120
    daemon.kill()
    daemon.start()
    assert [each["id"] for each in daemon.get("/towerd/v1/sessions")["sessions"]] == ["kept"]
    assert daemon.complete(kept)["timings"]["cache_n"] >= 99
    daemon.stop()
    with daemon.stored():
        pass


@pytest.mark.parametrize("has_rows", [True, False], ids=["rows", "journal"])
def test_lost_keys_are_not_made_anew(
    make_daemon: MakeDaemon, tmp_path: Path, has_rows: bool
) -> None:
    """With --encrypt, too: a backup of them may be put back."""
    daemon = make_daemon("--encrypt", f"file:{tmp_path / 'key'}").start()
    ask(daemon, "You are kind.", "Hello")
    wait_until_written(daemon)
    daemon.stop()
    names = ("keys.json", "keys.copy")
    for name in names:
        (daemon.store_dir / name).rename(tmp_path / name)
    if not has_rows:
        for folder in ("segments", "tokenizers"):
            shutil.rmtree(daemon.store_dir / folder)
    for flags in (daemon.flags, ()):
        daemon.flags = flags
        daemon.spawn()
        assert daemon.wait() != 0
        (error,) = (line for line in daemon.log.splitlines() if line.startswith("Error: "))
        assert "keys" in error
        assert not any((daemon.store_dir / name).exists() for name in names)
    (tmp_path / "keys.copy").rename(daemon.store_dir / "keys.copy")
    daemon.start()
    assert len(daemon.get("/towerd/v1/sessions")["sessions"]) == 1
    daemon.stop()
