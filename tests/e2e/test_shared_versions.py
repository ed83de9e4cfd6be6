"""Several daemons put records of one chat or base: what is taken is the newest text with the most rows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import requests
from daemon import Daemon, run_towerctl
from sharing import TALE, Place, ids_of, metric, say, shared
from waiting import until

MakeDaemon = Callable[..., Daemon]


def test_a_record_without_rows_hides_none(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """A chat is put again once it is frozen, and once a daemon with other rows has it: its rows are taken all the
    same. Objects that are too large, and junk beside the records, stop nothing."""
    place = Place(f"file://{tmp_path}/bucket")
    one = make_daemon(*place.flags(), name="a")
    key = one.store_dir / "shared.key"
    other = make_daemon(*place.flags(key), "--cache-type-k", "q8_0", name="b")
    three = make_daemon(*place.flags(key), name="c")
    with one, other:
        prompt = ids_of(one, TALE)
        reply, session, _ = say(one, prompt)
        n = len(prompt) + len(reply)
        assert shared(one, "push", session)["rows"] == n - 1
        assert run_towerctl(one, "freeze", session).returncode == 0
        assert shared(one, "push", session) == {"session": session, "tokens": n, "rows": n - 1}
        assert shared(other, "pull", session)["rows"] == 0
        assert shared(other, "push", session)["rows"] == 0
        for mark in (tmp_path / "bucket" / "marks").iterdir():
            with mark.open("r+b") as file:
                file.truncate((1 << 24) + 100)
        assert shared(one, "push", session)["tokens"] == n
        records = next((tmp_path / "bucket" / "sessions").iterdir())
        (records / f"000009-{'0' * 16}-{'0' * 16}-000000000-{'0' * 64}").write_bytes(b"junk")
        (records / f"000009-{'0' * 64}").write_bytes(b"junk")
    with three:
        taken = shared(three, "pull", session)
        assert (taken["tokens"], taken["rows"]) == (n, n - 1)


def test_bases_of_two_texts_and_two_models(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """A daemon with other rows takes a base and puts its own; the text stays as old as it is. A base of another text
    is not replaced by a pull unless it is told to."""
    place = Place(f"file://{tmp_path}/bucket")
    one = make_daemon(*place.flags(), name="a")
    key = one.store_dir / "shared.key"
    other = make_daemon(*place.flags(key), "--cache-type-k", "q8_0", name="b")
    with one, other:

        def n_here(daemon: Daemon) -> int:
            (base,) = daemon.get("/towerd/v1/bases")["bases"]
            return int(base["tokens"])

        def precache(text: str) -> None:
            base = {"name": "tale", "prompt": text, "level": 1, "public": True}
            one.post("/towerd/v1/precache", base)

        precache(TALE)
        old, new = len(ids_of(one, TALE)), len(ids_of(one, "New words. " + TALE))
        assert shared(one, "push", "--base", "tale")["rows"] == old
        assert shared(other, "pull", "--base", "tale")["rows"] == 0
        say(other, ids_of(other, TALE + "The end."))
        precache("New words. " + TALE)
        shared(one, "push", "--base", "tale")
        n_put = metric(other, "put_total")
        say(other, ids_of(other, TALE + "The end, then."))
        done = run_towerctl(other, "shared", "pull", "--base", "tale")
        assert (done.returncode, done.stdout) == (1, "")
        assert "has another text" in done.stderr
        assert "--base tale --replace takes that one." in done.stderr
        assert (n_here(one), n_here(other)) == (new, old)
        until(lambda: metric(other, "put_total") > n_put)
        assert shared(one, "pull", "--base", "tale")["tokens"] == new
        assert shared(other, "pull", "--base", "tale", "--replace")["tokens"] == new
        assert (n_here(one), n_here(other)) == (new, new)


def test_the_end_does_not_wait_for_a_server(make_daemon: MakeDaemon) -> None:
    """A push and a look-up wait for a server that takes connections and answers nothing while the daemon stops: it
    ends at once, with everything stored."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "towerd",
            "AWS_SECRET_ACCESS_KEY": "of-no-use",
        }
        with make_daemon("--shared", "s3://bucket/towers", name="a", **env) as daemon:
            prompt = ids_of(daemon, TALE)
            _, session, _ = say(daemon, prompt)
            assert metric(daemon, "lookups_late_total") == 1

            def push() -> None:
                with suppress(requests.RequestException):
                    where = f"{daemon.url}/towerd/v1/shared/push"
                    requests.post(where, json={"session": session}, timeout=60)

            pushing = threading.Thread(target=push)
            pushing.start()
            began = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began < 9
            pushing.join(60)
        with daemon.stored() as store:
            assert store.session(session).n_turns == 1


def test_a_prompt_that_is_to_be_evaluated_is_not_looked_up(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    with make_daemon("--shared", f"file://{tmp_path}/bucket", name="a") as daemon:
        prompt = ids_of(daemon, TALE)
        say(daemon, prompt, cache_prompt=False)
        assert metric(daemon, "lookups_total") == 0
        say(daemon, [5, *prompt])
        assert metric(daemon, "lookups_total") == 1
