"""Daemons share chats and bases through a folder and through a real S3 server, by what a person types."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import requests
from bad_line import Fault, bad_line
from daemon import Daemon, run_towerctl, run_towerd
from s3_server import S3Server, s3_server
from sharing import TALE, Place, ids_of, metric, say, shared
from store_tools import ROW_IDENTITY, check_rows, write_all
from waiting import until

from towerd.store import Store
from towerd.tiers.shared import objects
from towerd.tiers.shared.bucket import BucketError, open_bucket
from towerd.tiers.shared.tier import SharedTier

MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "server") as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A folder of the bucket for this test alone."""
    if request.param == "file":
        return Place(f"file://{tmp_path}/bucket")
    server: S3Server = request.getfixturevalue("s3")
    return Place(f"{server.url}/{tmp_path.name}", server.env)


def test_a_chat_roams(make_daemon: MakeDaemon, place: Place) -> None:
    """It continues on the other machine as it would have here, with nothing evaluated again, and comes back
    with the turn that it got there."""
    one = make_daemon(*place.flags(), name="a", **place.env)
    key = one.store_dir / "shared.key"
    two = make_daemon(*place.flags(key), name="b", **place.env)
    with one, two:
        prompt = ids_of(one, TALE)
        reply, session, _ = say(one, prompt)
        ids = prompt + reply
        put = shared(one, "push", session[:6])
        assert (put["tokens"], put["rows"]) == (len(ids), len(ids) - 1)
        assert shared(one, "push", session) == put
        assert metric(one, "put_total") == 3
        taken = shared(two, "pull", session)
        assert (taken["added"], taken["tokens"], taken["rows"]) == (1, len(ids), len(ids) - 1)
        here, there = say(one, [*ids, 13], 16), say(two, [*ids, 13], 16)
        assert there[:2] == here[:2]
        assert there[2] == {"live": 0, "hot": 0, "warm": len(ids) - 1, "prefill": 2}
        shared(two, "push", session)
        ids += [13, *there[0]]
        said = run_towerctl(one, "shared", "pull", session).stdout
        assert "; 1 turn was not here, and is a branch beside the current one.\n" in said
        assert one.session_ids(session) == ids  # both answered alike, each in a turn of its own
        requests.delete(f"{one.url}/towerd/v1/sessions/{session}", timeout=30)
        assert shared(one, "pull", session)["added"] == 2
        assert one.session_ids(session) == ids
        assert say(one, [*ids, 14])[2]["prefill"] <= 2
        assert metric(two, "damaged_total") == metric(two, "errors_total") == 0
        assert one.stop() == two.stop() == 0
    for daemon in (one, two):
        assert key.read_text().strip() not in daemon.log
        assert "of-no-use" not in daemon.log
        with daemon.stored():
            pass


def test_a_base_is_put_by_itself(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """What is precached here is in the bucket once nothing else runs, and a pinned chat, too. Another machine
    finds the base by the tokens of its first prompt, and evaluates nothing of it; both can be taken by name."""
    place = Place(f"file://{tmp_path}/bucket")
    one = make_daemon(*place.flags(), name="a", **place.env)
    two = make_daemon(*place.flags(one.store_dir / "shared.key"), name="b", **place.env)
    with one:
        one.post(
            "/towerd/v1/precache", {"name": "tale", "prompt": TALE, "level": 1, "public": True}
        )
        expected = say(one, [*ids_of(one, TALE), 50, 51])[0]
        session = say(one, ids_of(one, "Tom had a red ball."))[1]
        assert run_towerctl(one, "pin", "--session", session).returncode == 0
        until(lambda: metric(one, "put_total") >= 7)
        assert one.stop() == 0
    with two:
        prompt = [*ids_of(two, TALE), 50, 51]
        n = len(prompt) - 2
        answer, _, reuse = say(two, prompt)
        assert answer == expected
        assert reuse == {"live": 0, "hot": 0, "warm": n, "prefill": 2}
        assert (metric(two, "lookups_total"), metric(two, "lookups_found_total")) == (1, 1)
        assert say(two, [*prompt, *answer, 60])[2]["prefill"] == 2
        assert metric(two, "lookups_total") == 1
        said = run_towerctl(two, "shared", "pull", "--base", "tale").stdout
        assert said == f"Took base tale; {n} of its {n} tokens have their state here.\n"
        (base,) = two.get("/towerd/v1/bases")["bases"]
        assert (base["name"], base["public"], base["level"], base["tokens"]) == ("tale", True, 1, n)
        (chat,), (listed,) = shared(two, "list").values()
        assert (listed["name"], listed["public"], listed["rows"]) == ("tale", True, n)
        assert (chat["id"], chat["turns"]) == (session, 1)
        taken = shared(two, "pull", session)
        assert (taken["added"], taken["rows"]) == (1, taken["tokens"] - 1)
        assert taken["tokens"] == chat["tokens"]
        assert session in run_towerctl(two, "shared", "list").stdout
        assert shared(two, "list", "--scope", "guest")["sessions"] == []
        assert two.stop() == 0
    with two.stored():
        pass


def test_a_store_that_dies(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """It is killed while it is in use: who asks for it is told so in one sentence, and every chat continues."""
    with s3_server(tmp_path / "server") as server:
        daemon = make_daemon("--shared", server.url, name="a", **server.env)
        with daemon:
            prompt = ids_of(daemon, TALE)
            reply, session, _ = say(daemon, prompt)
            server.kill()
            for verb in ("push", "pull"):
                done = run_towerctl(daemon, "shared", verb, session)
                assert (done.returncode, done.stdout) == (1, "")
                assert done.stderr.startswith("Error: The shared tier cannot ")
                assert done.stderr.count("\n") == 1
            assert metric(daemon, "errors_total") == 2
            assert say(daemon, [*prompt, *reply, 13])[2]["prefill"] == 2
            assert metric(daemon, "lookups_total") == 1
            for first in (5, 6):  # the second is not looked up, since the first was not answered
                assert say(daemon, [first, *prompt])[2]["prefill"] == len(prompt) + 1
            assert metric(daemon, "lookups_total") == 2
            until(lambda: metric(daemon, "errors_total") == 3)
            assert daemon.stop() == 0


def test_a_store_that_does_not_answer(make_daemon: MakeDaemon) -> None:
    """Connections are taken and nothing comes: a prompt waits for a moment, once, and is evaluated."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "towerd",
            "AWS_SECRET_ACCESS_KEY": "of-no-use",
        }
        with make_daemon("--shared", "s3://bucket/towers", name="a", **env) as daemon:
            prompt = ids_of(daemon, TALE)
            for first in (5, 6):
                assert say(daemon, [first, *prompt])[2]["prefill"] == len(prompt) + 1
            assert (metric(daemon, "lookups_total"), metric(daemon, "lookups_late_total")) == (1, 1)


@pytest.mark.parametrize("fault", ["cut", "flip", "slow", "refuse"])
def test_a_bad_line(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """Whatever the line does to puts and gets: the rows that arrive are right, and over a good line all do."""
    ids = np.arange(300, dtype=np.int32)
    monkeypatch.setattr(objects, "PART_BYTES", 1 << 13)
    with (
        bad_line(s3.endpoint) as line,
        ExitStack() as stack,
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
    ):
        for name, value in {**s3.env, "AWS_ENDPOINT_URL": line.url}.items():
            monkeypatch.setenv(name, value)
        url = f"{s3.url}/{tmp_path.name}"

        def tier_of(store: Store) -> SharedTier:
            return SharedTier(store, open_bucket(url), bytes(32), "near", has_rows=True)

        write_all(one, one.insert(ids, "local", [300])[-1])
        line.fault = fault
        with suppress(BucketError):
            tier_of(one).put_path(ids, "local")
        line.fault = ""
        put = tier_of(one).put_path(ids, "local")
        assert put.n_tokens == 300
        for number in range(4):
            store = stack.enter_context(Store.open(tmp_path / f"new-{number}", ROW_IDENTITY))
            for each in (fault, ""):
                line.fault = each
                with suppress(BucketError):
                    tier_of(store).fetch_path(put, ids, "local")
                match = store.match(ids, "local")
                n = check_rows(store, match.nodes[-1]) if match.nodes else 0
                assert n in ((0, 300) if each else (300,))


def test_what_is_not_there(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Daemons without a shared tier, chats and bases that nobody put there, and packages that are missing, are
    each told in one sentence."""
    folder = f"file://{tmp_path}/bucket"
    with make_daemon(name="none") as daemon:
        done = run_towerctl(daemon, "shared", "push", "--base", "x")
        assert "has no shared tier: start it with --shared URL" in done.stderr
        assert metric(daemon, "put_total") == 0
    with make_daemon("--shared", folder, name="empty") as daemon:
        for args in (("some-chat",), ("--base", "some-base")):
            done = run_towerctl(daemon, "shared", "pull", *args)
            assert (
                f"The shared tier has no {'base' if len(args) > 1 else 'session'} 'some-"
                in done.stderr
            )
        done = run_towerctl(daemon, "shared", "push", "--base", "some-base")
        assert "There is no base 'some-base'" in done.stderr
        done = run_towerctl(daemon, "shared", "push", "some-chat")
        assert "there is no session 'some-chat'" in done.stderr
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "obstore.py").write_text(
        "raise ModuleNotFoundError('No module named obstore', name='obstore')\n"
    )
    here = str(tmp_path / "lib")
    done = run_towerd(tmp_path, "serve", "--port", "0", "--shared", folder, PYTHONPATH=here)
    assert done.returncode == 1
    assert "--shared needs the package obstore: pip install 'towerd[shared]'." in done.stderr
