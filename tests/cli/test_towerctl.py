"""towerctl against a real daemon, and against its store afterwards: the same answers."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from daemon import Daemon
from hub_server import hub_server

from towerd.cli.client.api_client import ApiClient
from towerd.cli.client.target import Target, connect
from towerd.system.paths import runtime_socket

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]

BASE = "Once upon a time there was a little girl named Lily. "


@pytest.fixture
def chats(server: Daemon) -> list[str]:
    """Two sessions with a common beginning: one named, one with two turns. Their ids."""
    named = {"X-Towerd-Session": "a name/with slash? &"}
    server.post("/completion", {"prompt": BASE + "She ran.", "n_predict": 5}, headers=named)
    first = server.complete(BASE + "She had a dog.", 6)
    server.complete(BASE + "She had a dog." + first["content"] + " Then", 6)
    found = server.get("/towerd/v1/sessions")["sessions"]
    assert len(found) == 2
    wait_for_rows(server)
    return [session["id"] for session in found]


def wait_for_rows(server: Daemon) -> None:
    """Rows are exported and written after the reply."""
    deadline = time.monotonic() + 30
    while not all(s["warm"] for s in server.get("/towerd/v1/segments")["segments"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def at(server: Daemon) -> tuple[str, Path]:
    return "--socket", server.socket


def without_daemon(server: Daemon) -> AbstractContextManager[ApiClient]:
    return connect(Target(store_dir=str(server.store_dir)))


def answers(backend: ApiClient) -> dict[str, Any]:
    """Every read-only request of a client."""
    sessions = backend.sessions(100)
    segments = backend.segments("id", 100)
    return {
        "sessions": sessions,
        "local": backend.sessions(1, "local"),
        "nobody": backend.sessions(100, "nobody"),
        "session": [backend.session(each["id"]) for each in sessions],
        "segments": segments,
        "page": backend.segments("tokens", 2, 1),
        "nobody's": backend.segments("used", 9, 0, "nobody"),
        "segment": [backend.segment(each["id"], ids=True) for each in segments["segments"]],
        "trie": backend.tree(0, 50, 100),
        "cut": [backend.tree(0, 1, 100), backend.tree(0, 50, 2), backend.tree(1, 50, 100)],
        "pins": backend.pins(),
        "bases": backend.bases(),
        "gc": backend.gc(30.0, True),
        "stats": {
            name: backend.stats()["store"][name]
            for name in ("segments", "tokens", "files", "sessions", "bases", "warm_bytes")
        },
        "fingerprint": backend.stats()["fingerprint"],
        "stats keys": sorted(backend.stats()),
        "verify": backend.verify(False, lambda done, total: None),
    }


def without_hot(value: Any) -> Any:
    """RAM does not outlive the daemon."""
    if isinstance(value, dict):
        return {key: without_hot(each) for key, each in value.items() if key != "hot"}
    return [without_hot(each) for each in value] if isinstance(value, list) else value


@contextmanager
def both(server: Daemon) -> Iterator[dict[str, Any]]:
    """The daemon's answers; it is stopped then."""
    with ApiClient.at_socket(server.socket) as daemon:
        said = answers(daemon)
    assert server.stop() == 0
    yield said


def test_daemon_and_store_give_the_same_answers(server: Daemon, chats: list[str]) -> None:
    with ApiClient.at_socket(server.socket) as daemon:
        leaf = daemon.session(chats[0])["turns"][-1]["reply_node"]
        assert daemon.pin(leaf)["pinned"]
        daemon.delete_session(chats[1])
    with both(server) as said, without_daemon(server) as store:
        assert without_hot(answers(store)) == without_hot(said)
        assert said["gc"]["segments"] > 0


def test_both_change_the_same_things(server: Daemon, chats: list[str]) -> None:
    """gc frees what the dry run reported; pins are set and removed."""

    def change(backend: ApiClient, session: str) -> None:
        turn = backend.session(session)["turns"][-1]
        backend.pin(turn["reply_node"])
        backend.delete_session(session)
        assert backend.gc(30.0, True)["segments"] == 0
        backend.unpin(turn["reply_node"])
        expected = backend.gc(30.0, True)
        assert backend.gc(30.0, False) == expected
        assert expected["segments"] > 0
        assert expected["bytes_freed"] > 0

    with ApiClient.at_socket(server.socket) as daemon:
        change(daemon, chats[0])
    assert server.stop() == 0
    with without_daemon(server) as store:
        change(store, chats[1])
        assert store.segments("id", 9)["total"] == 0


def test_sessions(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    listed = ctl_json("sessions", "ls", *at(server))["sessions"]
    assert [each["id"] for each in listed] == chats
    assert len(ctl_json("sessions", "ls", "--limit", 1, *at(server))["sessions"]) == 1
    shown = ctl("sessions", "ls", *at(server)).output
    named, generated = sorted(chats, key=lambda id: "/" not in id)
    assert named in shown
    assert generated[:8] in shown
    assert generated not in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
    for id in chats:
        found = ctl_json("sessions", "show", id, *at(server))
        assert set(found) == {"session", "turns", "rows", "path", "tiers", "kept", "text"}
        assert found["kept"] is None
        assert sum(found["tiers"].values()) == found["session"]["n_tokens"]
        assert sum(each["tokens"] for each in found["path"]) < found["session"]["n_tokens"]
        assert found["text"] is None
        whole = ctl_json("sessions", "show", id, "--text", *at(server))["text"]
        assert BASE.strip() in whole
        assert BASE.strip() in ctl("sessions", "show", id, *at(server)).output


def test_the_beginning_of_an_id_will_do(
    server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson
) -> None:
    """Wherever an id does, with a daemon and without; not that of a name, nor of several sessions."""
    (id,) = [each for each in chats if "/" not in each]
    file = server.root / "x.tower"
    for where in (at(server), ("--store-dir", server.store_dir)):
        assert ctl_json("sessions", "show", id[:8], *where)["session"]["id"] == id
        assert ctl_json("export", id[:4], "-o", file, "--force", *where)["session"] == id
        assert ctl_json("freeze", id[:6], *where)["frozen"][0]["session"]["id"] == id
        assert ctl_json("recode", id[:6], *where)["recoded"][0]["changed"]
        assert ctl_json("thaw", id[:6], *where)["thawed"][0]["changed"]
        assert ctl_json("pin", "--session", id[:6], *where)["pinned"]["pinned"]
        for none in (id[:3], "a name", "0" * 15 if id[0] != "0" else "1" * 15):
            assert "there is no session" in ctl("sessions", "show", none, *where, code=1).output
        if server.is_running:
            server.stop()
    with server.stored() as store:
        others = [digit for digit in "012" if digit != id[8]]
        twins = [id[:8] + digit * 8 for digit in others]
        for twin in twins:
            with store.locked(), store.state.catalog.transaction():
                store.state.catalog.run(
                    "INSERT INTO sessions(tokenizer, scope, id, named, created, updated)"
                    " VALUES (?, 'local', ?, 0, 0, 0)",
                    (store.state.identity.tokenizer, twin),
                )
    alone = ("--store-dir", server.store_dir)
    said = ctl("sessions", "rm", id[:8], "--yes", *alone, code=1).output
    assert f"Several sessions begin with {id[:8]}" in said
    assert ctl_json("sessions", "rm", twins[1][:9], "-y", *alone) == {"deleted": [twins[1]]}


def test_sessions_rm_asks(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    result = ctl("sessions", "rm", *chats, *at(server), input="n\n", code=1)
    assert re.match(r"Forget 2 sessions with \d+ tokens\? ", result.output)
    ctl("sessions", "rm", chats[0], *at(server), code=1)  # without confirmation
    ctl("sessions", "rm", chats[0], "no-such", "--yes", *at(server), code=1)
    assert len(ctl_json("sessions", "ls", *at(server))["sessions"]) == 2
    ctl("sessions", "rm", chats[0], *at(server), input="y\n")
    assert ctl_json("sessions", "rm", chats[1], "-y", *at(server)) == {"deleted": [chats[1]]}
    assert ctl("sessions", "ls", *at(server)).output == "No sessions yet.\n"


def test_segments(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    found = ctl_json("segments", "ls", "--sort", "tokens", *at(server))
    sizes = [each["tokens"] for each in found["segments"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == found["total"]
    assert (
        f"1 of {found['total']} segments."
        in ctl("segments", "ls", "--limit", 1, *at(server)).output
    )
    id = found["segments"][0]["id"]
    one = ctl_json("segments", "show", id, *at(server))
    assert (one["text"], one["ids"]) == (None, None)
    one = ctl_json("segments", "show", id, "--text", "--ids", *at(server))
    assert len(one["ids"]) == one["tokens"] == sizes[0]
    assert "Once upon a time" in ctl("segments", "show", id, *at(server)).output
    assert "there is no segment 999" in ctl("segments", "show", 999, *at(server), code=1).output


def test_trie(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    drawn = ctl("trie", *at(server)).output
    assert "“<s> Once upon a time" in drawn
    assert drawn.count("#") == ctl_json("segments", "ls", *at(server))["total"]
    assert "“" not in ctl("trie", "--no-text", *at(server)).output
    assert "There is more" in ctl("trie", "--depth", 1, *at(server)).output
    found = ctl_json("trie", "--text", *at(server))
    assert set(found) == {"root", "trie", "segments", "truncated"}
    assert found["trie"][0]["text"].startswith("<s> Once")
    assert "text" not in ctl_json("trie", *at(server))["trie"][0]


def test_pins(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    assert ctl("pin", *at(server)).output == "Nothing is pinned.\n"
    pinned = ctl_json("pin", "--session", chats[0], *at(server))["pinned"]
    assert pinned["pinned"]
    assert [each["id"] for each in ctl_json("pin", *at(server))["pins"]] == [pinned["id"]]
    assert str(pinned["id"]) in ctl("pin", *at(server)).output
    assert ctl_json("unpin", pinned["id"], *at(server)) == {"unpinned": pinned["id"], "base": None}
    ctl("unpin", pinned["id"], *at(server), code=1)
    ctl("unpin", *at(server), code=1)
    ctl("unpin", 1, "--base", "x", *at(server), code=1)
    assert "There is no base 'x'" in ctl("unpin", "--base", "x", *at(server), code=1).output


def test_stats(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    found = ctl_json("stats", *at(server))
    assert found["store"]["sessions"] == 2
    assert found["model"] == "stories260K.gguf"
    shown = ctl("stats", *at(server)).output
    assert re.search(r"^sessions +2$", shown, re.MULTILINE)
    assert re.search(r"^live +[\d,]+ of [\d,]+ tokens$", shown, re.MULTILINE)


def test_verify_finds_and_repairs_damage(
    server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson
) -> None:
    assert "All is well." in ctl("verify", *at(server)).output
    assert server.stop() == 0
    victim = max((server.store_dir / "segments").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data.rstrip(b"\0")) - 1] ^= 1  # the last row's last byte that says anything
    victim.write_bytes(data)
    store = ("--store-dir", server.store_dir)
    found = ctl_json("verify", *store, code=1)
    assert (found["ok"], found["quarantined"], len(found["problems"])) == (False, 0, 1)
    told = ctl("verify", *store, code=1).output
    assert victim.name in told
    assert "No conversation is lost" in told
    assert "1 damaged files were moved" in ctl("verify", "--repair", *store, code=1).output
    assert ctl_json("verify", *store)["ok"]
    assert (server.store_dir / "quarantine" / victim.name).exists()
    assert ctl_json("gc", "--quarantine-days", 0, *store)["bytes_freed"] >= len(data)
    assert not (server.store_dir / "quarantine" / victim.name).exists()
    assert len(ctl_json("sessions", "ls", *store)["sessions"]) == 2


def test_gc(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    ctl("sessions", "rm", chats[1], "--yes", *at(server))
    dry = ctl_json("gc", "--dry-run", *at(server))
    assert "nothing was changed" in ctl("gc", "--dry-run", *at(server)).output
    wet = ctl_json("gc", *at(server))
    assert set(dry) == set(wet) == {"dry_run", "segments", "files", "bytes_freed"}
    assert dry["dry_run"] is True
    assert {**dry, "dry_run": False} == wet
    assert wet["segments"] > 0
    assert "Removed 0 segments and 0 files; 0 B freed." in ctl("gc", *at(server)).output
    assert ctl_json("verify", *at(server))["ok"]


def test_over_tcp(server: Daemon, chats: list[str], ctl: Ctl, ctl_json: CtlJson) -> None:
    assert len(ctl_json("sessions", "ls", "--url", server.url)["sessions"]) == 2
    ctl("stats", "--url", server.url, "--api-key", "any")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--url", "ftp://x"), "--url must be like http://127.0.0.1:8080"),
        (("--url", "http://[::1"), "--url must be like"),
        (("--url", "http://x:99999"), "--url must be like"),
        (("--url", "http://foo..bar:80"), "--url must be like"),
        (("--url", "http://foo bar"), "--url must be like"),
        (("--url", "http://127.0.0.1:1"), "The daemon at http://127.0.0.1:1 does not answer"),
        (("--url", "http://127.0.0.1:1", "--api-key", "ä"), "--api-key must be printable ASCII"),
        (("--api-key", "k"), "--api-key goes with --url"),
        (("--socket", "/nonexistent/s"), "No daemon listens on /nonexistent/s: start one"),
        (("--socket", "s" * 200), "is longer than 103 bytes"),
        (("--socket", "s", "--store-dir", "d"), "Give one of --url, --socket and --store-dir"),
        (("--store-dir", "/nonexistent"), "There is no store at /nonexistent: run towerd serve"),
        (("--config", "/nonexistent"), "The settings file /nonexistent does not exist."),
    ],
)
def test_no_daemon_to_ask(ctl: Ctl, args: tuple[str, ...], said: str) -> None:
    """One sentence, and nothing is made."""
    result = ctl("stats", *args, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_server_that_is_no_towerd(ctl: Ctl) -> None:
    """One sentence for whatever it answers."""
    with hub_server() as other:
        at = ("--url", other.url)
        said = ctl("stats", *at, code=1).stderr
        assert "does not answer properly: status 404 without an error object; is it" in said
        other.page = b'{"error": {"code": "not_found", "message": "No such page"}}'
        assert ctl("stats", *at, code=1).stderr == "Error: No such page\n"


def test_names_that_are_not_utf8(ctl: Ctl) -> None:
    at = ("--url", "http://127.0.0.1:1")
    for args in (("sessions", "show", "\udcff"), ("sessions", "ls", "--scope", "\udcff")):
        said = ctl(*args, *at, code=1).stderr
        assert said.startswith("Error: '\\udcff' is not UTF-8")


def test_no_daemon_and_no_store(ctl: Ctl, tmp_path: Path) -> None:
    result = ctl("sessions", "ls", code=1)
    assert "There is no store at" in result.output
    assert list(tmp_path.iterdir()) == []


def test_the_choice_is_automatic(
    server: Daemon, chats: list[str], ctl_json: CtlJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same settings: the daemon while it runs, then its store."""
    monkeypatch.setenv("TOWERD_SOCKET", str(server.socket))
    monkeypatch.setenv("TOWERD_STORE_DIR", str(server.store_dir))
    assert ctl_json("stats")["engine_name"] == "embedded"
    server.kill()
    assert ctl_json("stats")["engine_name"] is None
    assert len(ctl_json("sessions", "ls")["sessions"]) == 2
    assert ctl_json("verify")["ok"]


def test_daemons_live_side_by_side(
    ctl: Ctl, ctl_json: CtlJson, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two stores, two daemons that name no socket: --store-dir finds each, and its store once it has
    ended. A socket that is set belongs to the store that is set."""
    with tempfile.TemporaryDirectory(prefix="towerd-") as folder, ExitStack() as stack:
        run = {"XDG_RUNTIME_DIR": folder, "XDG_DATA_HOME": folder}
        for name, value in run.items():
            monkeypatch.setenv(name, value)
        daemons = [Daemon(tmp_path / name, env=run) for name in "ab"]
        for number, each in enumerate(daemons):
            each.names_socket = False
            stack.enter_context(each)
            named = {"X-Towerd-Session": f"chat-{number}"}
            each.post("/completion", {"prompt": "Once", "n_predict": 2}, headers=named)
        stores = [("--store-dir", each.store_dir) for each in daemons]
        monkeypatch.setenv("TOWERD_STORE_DIR", str(daemons[0].store_dir))
        for at, number in ((stores[0], 0), (stores[1], 1), ((), 0)):
            (found,) = ctl_json("sessions", "ls", *at)["sessions"]
            assert found["id"] == f"chat-{number}"
            assert ctl_json("stats", *at)["engine_name"] == "embedded"
        monkeypatch.setenv("TOWERD_SOCKET", str(runtime_socket(daemons[0].store_dir)))
        (found,) = ctl_json("sessions", "ls", *stores[1])["sessions"]
        assert found["id"] == "chat-1"
        assert daemons[1].stop() == 0
        assert ctl_json("stats", *stores[1])["engine_name"] is None
        assert daemons[0].is_running


def test_a_store_in_use_is_refused(server: Daemon, ctl: Ctl) -> None:
    said = ctl("stats", "--store-dir", server.store_dir, code=1).output
    assert f"is in use by process {server.pid}" in said
    assert "--socket" in said


def test_text_needs_the_daemon(server: Daemon, chats: list[str], ctl: Ctl) -> None:
    server.stop()
    store = ("--store-dir", server.store_dir)
    for command in (("sessions", "show", chats[0]), ("segments", "show", 1), ("trie",)):
        assert "start the daemon" in ctl(*command, "--text", *store, code=1).output
    assert (
        "The daemon has to run to show its text."
        in ctl("sessions", "show", chats[0], *store).output
    )
    assert chats[0][:8] in ctl("sessions", "ls", *store).output
    assert "#1" in ctl("trie", *store).output
    for which in (1, "abcdef"):
        assert "start it with towerd serve" in ctl("why", which, *store, code=1).output
    assert "not running" in ctl("stats", *store).output


def test_a_daemon_that_dies_is_one_sentence(server: Daemon, ctl: Ctl) -> None:
    """A process that stops answering in the middle."""
    with ApiClient.at_socket(server.socket) as daemon:
        daemon.stats()
        server.signal(signal.SIGKILL)
        server.wait()
        with pytest.raises(Exception, match="has ended"):
            daemon.stats()


def test_tenants_see_their_own(tmp_path: Path, ctl: Ctl, ctl_json: CtlJson) -> None:
    """A key over TCP shows its tenant's state only and changes nothing for all."""
    with Daemon(tmp_path, "--api-key", "alice:one", "--api-key", "bob:two") as server:
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}", "X-Towerd-Session": "chat"}
            server.post("/completion", {"prompt": BASE, "n_predict": 2}, headers=headers)
        alice = ("--url", server.url, "--api-key", "one")
        found = ctl_json("sessions", "ls", *alice)["sessions"]
        assert [(each["id"], each["scope"]) for each in found] == [("chat", "alice")]
        assert "over its Unix socket" in ctl("gc", *alice, code=1).output
        wrong = ctl("stats", "--url", server.url, code=1).output
        assert "give the daemon's key with --api-key" in wrong
        assert (
            "several tenants have a session 'chat'"
            in ctl("sessions", "show", "chat", *at(server), code=1).output
        )
        bob = ctl_json("sessions", "show", "chat", "--scope", "bob", *at(server))
        assert bob["session"]["scope"] == "bob"
        assert len(ctl_json("sessions", "ls", "--scope", "bob", *at(server))["sessions"]) == 1
