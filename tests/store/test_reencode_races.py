"""Re-encoding while other things happen: splits, removals, loads, a full disk, kill -9."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reencoded import IDS, one_leaf, reencode
from store_tools import (
    check_rows,
)

from towerd.errors import StoreError
from towerd.store import FormatRequest, SegmentFile, Store

SUPPORT = Path(__file__).resolve().parent.parent / "support"


def meanwhile(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do `action` once the new file lies there and before the catalog knows it."""
    real = os.rename
    done: list[bool] = []

    def rename(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        if not done:
            done.append(True)
            action()

    monkeypatch.setattr(os, "rename", rename)


def test_split_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a segment that was split view the new file."""
    leaf, file = one_leaf(store)
    meanwhile(monkeypatch, lambda: store.insert(IDS, "local", [20]))
    new = reencode(store, file, FormatRequest(4, 50, "q4h"))
    assert [(n.p0, n.file) for n in leaf.path()] == [(0, new), (20, new)]
    assert check_rows(store, leaf) == 50
    store.check_integrity(keys=True)


def test_removal_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """gc, an eviction or a quarantine wins, and the new file goes."""
    ways: list[Callable[[SegmentFile], object]] = [
        lambda _: store.gc(),
        store.rows.drop_file,
        lambda file: store.rows.drop_file(file, set_aside=True),
    ]
    for remove in ways:
        _, file = one_leaf(store)
        with monkeypatch.context() as patch:
            meanwhile(patch, functools.partial(remove, file))
            assert store.rows.reencode(file, [FormatRequest(4, 50, "q4h")]) is None
        assert store.state.directory.names() == set()
        assert store.rows.reencode(file, [FormatRequest(4, 50, "q4h")]) is None
        store.check_integrity(keys=True)


def test_loads_continue(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows planned before are loaded from the new file, rows loaded before stay readable."""
    leaf, file = one_leaf(store)
    (part,) = store.plan_rows(leaf, 0, 50)
    loaded = store.rows.load(part)
    before = [plane.copy() for rows in loaded for plane in rows.planes()]
    during: list[int] = []
    meanwhile(monkeypatch, lambda: during.append(len(store.rows.load(part))))
    new = reencode(store, file, FormatRequest(4, 50, "q8"))
    assert during == [50]
    reencode(store, new, FormatRequest(0, 4, "q8"))
    assert [(len(r), r.layout.format_name) for r in store.rows.load(part)] == [(50, "q8")]
    after = [plane for rows in loaded for plane in rows.planes()]
    assert all(map(np.array_equal, before, after))


def test_file_that_goes_between_check_and_load(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one moment at which the old file is trusted and gone: the new one serves."""
    leaf, file = one_leaf(store)
    check_rows(store, leaf)
    (part,) = store.plan_rows(leaf, 0, 50)
    real = file.rows

    def rows(*args: object, **named: object) -> object:
        monkeypatch.setattr(SegmentFile, "rows", unpatched)
        reencode(store, file, FormatRequest(4, 50, "q8"))
        raise FileNotFoundError(2, "gone")

    unpatched = SegmentFile.rows
    assert real is not None
    monkeypatch.setattr(SegmentFile, "rows", rows)
    assert len(store.rows.load(part)) == 50


def test_full_disk_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space for the second copy: the first stays in use."""
    leaf, file = one_leaf(store)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="No space"):
            store.rows.reencode(file, [FormatRequest(4, 50, "q4h")])
    assert leaf.file is file
    assert check_rows(store, leaf) == 50
    assert store.state.directory.names() == {file.path.name}
    store.check_integrity(keys=True)


CRASHES = textwrap.dedent(
    """
    import os, shutil, sys
    from pathlib import Path
    from store_tools import ROW_IDENTITY, check_rows, write_all
    import numpy as np
    from towerd.kernels import dispatch
    from towerd.store import Store
    from towerd.store import FormatRequest
    from towerd.store.catalog.sqlite import SqliteCatalog

    root, copy = Path(sys.argv[1]), Path(sys.argv[1] + "-copy")
    IDS = np.arange(100, 150, dtype=np.int32)
    with Store.open(root, ROW_IDENTITY) as store:
        write_all(store, store.insert(IDS, "local", [20, 50])[-1])

    def dying(call, after):
        def wrapper(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and not after:
                os._exit(9)
            value = call(*args, **kwargs)
            if left[0] == 0 and after:
                os._exit(9)
            return value
        return wrapper

    def child(after):
        with Store.open(copy, ROW_IDENTITY) as store:
            (file,) = store.files()
            for owner, name in (
                (os, "pwrite"), (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "open"),
                (Path, "unlink"), (SqliteCatalog, "run"), (SqliteCatalog, "run_many"),
                (dispatch, "transcoded"),
            ):
                setattr(owner, name, dying(getattr(owner, name), after))
            store.rows.reencode(file, [FormatRequest(4, 40, "q4h")])
            left[0] = 1 << 30
        os._exit(0)

    n = 0
    for after in (False, True):
        status, point = 9, 0
        while status != 0:
            point += 1
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(root, copy)
            pid = os.fork()
            if pid == 0:
                left = [point]
                child(after)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, 9), status
            with Store.open(copy, ROW_IDENTITY) as store:
                assert check_rows(store, store.match(IDS, "local").nodes[-1]) == 50
                store.check_integrity(keys=True)
                assert store.verify().ok, store.verify()
                store.pins.add(store.match(IDS, "local").nodes[-1].id)
                store.gc()
                assert len(store.state.directory.names()) == 1
        n += point
    print("points", n)
    """
)


def test_killed_at_every_point(root: Path) -> None:
    """Before and after every call that changes something on disk: all rows are there, in one
    file or the other, and nothing else is left after gc."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CRASHES, str(root)],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 20
