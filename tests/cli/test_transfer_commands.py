"""`towerctl export` and `towerctl import`: where files go, and a store without its daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from daemon import Daemon

from towerd.cli.sessions.transfer import file_name

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]

NAME = "a name/with slash? &"
FILE = "a_name_with_slash___.tower"


@pytest.mark.parametrize(
    ("session", "name"),
    [
        ("5f2c9a1e", "5f2c9a1e.tower"),
        (NAME, FILE),
        ("..", "_..tower"),
        ("-rf", "_rf.tower"),
        ("x" * 200, "x" * 100 + ".tower"),
    ],
)
def test_default_names(session: str, name: str) -> None:
    assert file_name(session) == name


def test_export_and_import(
    server: Daemon, ctl: Ctl, ctl_json: CtlJson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name to a default file, never over another; the store alone gives the same bytes and
    takes the same file."""
    monkeypatch.chdir(tmp_path)
    at = ("--socket", server.socket)
    server.post(
        "/completion", {"prompt": "Once", "n_predict": 5}, headers={"X-Towerd-Session": NAME}
    )
    assert f"Wrote {FILE}" in ctl("export", NAME, *at).output
    data = Path(FILE).read_bytes()
    assert Path(FILE).stat().st_mode & 0o777 == 0o600
    assert "--force" in ctl("export", NAME, *at, code=1).output
    wrote = ctl_json("export", NAME, "--force", *at)
    media = {"carried": 0, "left_out": 0}
    assert wrote == {"session": NAME, "file": FILE, "bytes": len(data), "media": media}
    assert "no session 'none'" in ctl("export", "none", *at, code=1).output
    assert "no directory" in ctl("export", NAME, "-o", "none/a.tower", *at, code=1).output
    assert "is a directory" in ctl("export", NAME, "-o", ".", *at, code=1).output
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert "cannot be read" in ctl("import", "none.tower", *at, code=1).output
    assert server.stop() == 0
    alone = ("--store-dir", server.store_dir)
    ctl("export", NAME, "-o", "alone.tower", *alone)
    assert Path("alone.tower").read_bytes() == data
    ctl("sessions", "rm", NAME, "--yes", *alone)
    (found,) = ctl_json("import", FILE, *alone)["imported"]
    assert (found["file"], found["added"], found["bases"]) == (FILE, 1, [])
    assert found["session"]["id"] == NAME
    twice = ctl("import", FILE, FILE, *alone).output
    assert twice == f"Session {NAME} is here already; nothing was changed.\n" * 2
    ctl("import", FILE, "--scope", "guest", *alone)
    with server.stored() as store:
        assert {info.scope for info in store.sessions()} == {"local", "guest"}
        assert (
            store.session_ids(NAME, "guest").tolist() == store.session_ids(NAME, "local").tolist()
        )
