"""A GET or HEAD changes nothing that is stored, whatever it asks for."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import requests
from daemon import Daemon

from towerd.app.routes import ROUTES

QUERIES = ("", "?ids=1&text=1&q=dog&conv_id=none")
NAMES = {"{name}": "page.js", "{file:.+[.][a-z0-9]+}": "page.js"}
STORY = "Once upon a time there was a dog who had a red ball."


def stored(store_dir: Path) -> dict[str, list[str]]:
    """Every row of the catalog and the names and sizes of the other files."""
    found = {
        "files": sorted(
            f"{path.relative_to(store_dir)} {path.stat().st_size}"
            for path in store_dir.rglob("*")
            if path.is_file() and "sqlite" not in path.name
        )
    }
    uri = f"file:{store_dir}/catalog.sqlite?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as catalog:
        tables = catalog.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            rows = catalog.execute(f"SELECT * FROM {table}").fetchall()
            found[table] = sorted(map(repr, rows))
    return found


def paths(ids: dict[str, list[str]]) -> list[str]:
    """Every route that answers a GET, for each id of what it is about."""
    found = []
    for route in ROUTES:
        if route.method != "GET":
            continue
        path = route.path
        for field, name in NAMES.items():
            path = path.replace(field, name)
        kind = "sessions" if "/sessions/" in path else "segments"
        found += [path.replace("{id}", each) for each in (ids[kind] if "{id}" in path else [""])]
    return found


def test_gets_change_nothing(tmp_path: Path) -> None:
    """Neither of a frozen session nor of one with rows, which was not frozen by itself."""
    with Daemon(tmp_path, "-c", "1024", "--freeze-after", "-1") as daemon:
        frozen, warm = (f"{name}-{number}" for number, name in enumerate(("frozen", "warm")))
        for name in (frozen, warm):
            body: dict[str, Any] = {"prompt": f"{name} {STORY}", "n_predict": 8}
            headers = {"X-Towerd-Session": name}
            assert requests.post(daemon.url + "/completion", json=body, headers=headers, timeout=60)
        daemon.stop()
        daemon.start()  # all is written
        daemon.post(f"/towerd/v1/sessions/{frozen}/freeze", {})
        segments = daemon.get("/towerd/v1/segments")["segments"]
        before = stored(daemon.store_dir)
        asked = paths({"sessions": [frozen, warm], "segments": [str(segments[0]["id"])]})
        assert any(path.endswith("/export") for path in asked)
        for path in asked:
            for query in QUERIES:
                requests.get(daemon.url + path + query, timeout=60)
            requests.head(daemon.url + path, timeout=60)
        assert stored(daemon.store_dir) == before
        assert daemon.get(f"/towerd/v1/sessions/{frozen}")["session"]["cold_bytes"]
        assert daemon.stop() == 0
