"""`towerctl freeze`, `thaw` and `recode`, with the daemon and on the store itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result
from daemon import Daemon
from store_tools import ROW_IDENTITY, turn_of

from towerd.store import Store

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]


def test_with_a_daemon_and_without(server: Daemon, ctl: Ctl, ctl_json: CtlJson) -> None:
    """By name and by age; listings, stats and verify show it; wrong usage is an error."""
    at = ("--socket", server.socket)
    for name in ("one", "two"):
        server.post(
            "/completion",
            {"prompt": f"Once there was {name}", "n_predict": 9},
            headers={"X-Towerd-Session": name},
        )
    ids = server.session_ids("one")
    assert "frozen, " in ctl("freeze", "one", *at).output
    assert ctl("freeze", "one", *at).output == "Session one: is frozen already.\n"
    assert "no session 'none'" in ctl("freeze", "none", *at, code=1).output
    assert "give --idle" in ctl("freeze", *at, code=2).output
    assert "not a time such as" in ctl("freeze", "--idle", "soon", *at, code=2).output
    assert "unused for that long" in ctl("freeze", "--idle", "1h", *at).output
    (found,) = ctl_json("freeze", "--idle", "0s", *at)["frozen"]
    assert (found["session"]["id"], found["changed"]) == ("two", True)
    listed = ctl_json("sessions", "ls", *at)["sessions"]
    assert all(0 < each["cold_bytes"] < 200 for each in listed)
    assert "frozen, its tokens are coded" in ctl("sessions", "show", "one", *at).output
    assert "is frozen: thaw it" in ctl("pin", "--session", "one", *at, code=1).output
    assert "2 of them" in ctl("stats", *at).output
    assert "2 of them frozen" in ctl("verify", *at).output
    assert "Session one: coded again, " in ctl("recode", "one", *at).output
    assert "give --all" in ctl("recode", *at, code=2).output
    recoded = ctl_json("recode", "--all", *at)["recoded"]
    assert {each["session"]["id"]: each["changed"] for each in recoded} == {
        "one": True,
        "two": True,
    }
    (found,) = ctl_json("thaw", "one", *at)["thawed"]
    assert found["changed"] is True
    assert server.session_ids("one") == ids
    assert server.stop() == 0
    alone = ("--store-dir", server.store_dir)
    assert "frozen, " in ctl("freeze", "--idle", "0", *alone).output
    assert "its tokens are coded" in ctl("sessions", "show", "one", *alone).output
    ctl("gc", *alone)
    assert "'one' is frozen: thaw it" in ctl("pin", "--session", "one", *alone, code=1).output
    assert ctl("thaw", "one", "one", *alone).output == f"Session one: thawed, {len(ids)} tokens.\n"
    assert "was not frozen" in ctl("thaw", "one", *alone).output
    assert ctl("recode", "one", *alone).output == "Session one: coded again.\n"  # its copy
    with server.stored() as store:
        assert store.session_ids("one").tolist() == ids


def test_what_is_not_about_a_session_is_said_twice_at_most(tmp_path: Path, ctl: Ctl) -> None:
    """Many are due, and the model is not there: it ends, and fails."""
    with Store.open(tmp_path / "store", ROW_IDENTITY) as store:
        for number in range(5):
            store.commit_turn(turn_of([1, 2, 3], [4], session=f"s{number}"))
    said = ctl("freeze", "--idle", "0", "--store-dir", tmp_path / "store", code=1).stderr
    assert said.count("has another tokenizer than the model that is served") == 2
