"""kill -9 while turns are committed and rows are written and re-encoded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from store_tools import ROW_IDENTITY, check_rows

from towerd.store import Store
from towerd.tokens import Provenance

SUPPORT = Path(__file__).resolve().parent.parent / "support"
KILLS = 20

WORKER = textwrap.dedent(
    """
    import os, sys, threading
    from pathlib import Path
    from store_tools import ROW_IDENTITY, make_hot, turn_of
    from towerd.store import Store
    from towerd.store import FormatRequest
    def history(chat, n_turns):
        ids = list(range(50))
        for turn in range(n_turns):
            ids += [1000 + chat, turn, 7, 8] + [chat * 31 + turn * 7 + i for i in range(6)]
        return ids

    store = Store.open(Path(sys.argv[1]), ROW_IDENTITY)
    done = {int(info.id): info.n_turns for info in store.sessions()}
    nodes = []

    def write_forever():
        n = 0
        while True:
            n += 1
            if not nodes:
                continue
            node = nodes[-1]
            make_hot(store, node)
            run = [each for each in node.path() if each.hot is not None and each.file is None]
            cold = [each for each in node.path() if each.file is None]
            if run and run == cold:
                store.rows.write(run)
            for each in node.path():
                store.rows.drop_hot(each)
            files = list({each.file for each in node.path() if each.file is not None})
            if n % 2 == 0 and files:
                file = files[n % len(files)]
                cut = file.p0 + file.n_rows * (n % 7) // 7
                store.rows.reencode(file, [FormatRequest(cut, 1 << 20, ("q4h", "q6", "q8")[n % 3])])
            if n % 5 == 0 and files:
                store.rows.drop_file(files[-1])
            if n % 7 == 0:
                store.gc()
                store.flush()

    threading.Thread(target=write_forever, daemon=True).start()
    os.write(1, b"ready\\n")
    turn = 0
    while True:
        for chat in range(4):
            n = done.get(chat, 0) + 1
            ids = history(chat, n)
            result = store.commit_turn(turn_of(ids[:-6], ids[-6:], session=str(chat)))
            os.write(1, f"{chat} {n}\\n".encode())
            done[chat] = n
            nodes.append(result.node)
    """
)


def history(chat: int, n_turns: int) -> list[int]:
    """The same tokens as the worker's."""
    ids = list(range(50))
    for turn in range(n_turns):
        ids += [1000 + chat, turn, 7, 8] + [chat * 31 + turn * 7 + i for i in range(6)]
    return ids


def run_and_kill(root: Path, delay_s: float, script: str = WORKER) -> dict[int, int]:
    """Let the worker run for a while, kill it, return the turns it acknowledged per chat."""
    env = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-P", "-c", script, str(root)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(delay_s)
        worker.kill()
        lines = worker.stdout.read().split(b"\n")[:-1]
    return {int(chat): int(n) for chat, n in (line.split() for line in lines)}


def test_no_acknowledged_token_is_lost(root: Path) -> None:
    """Whatever was printed as committed is there after a kill at any moment, and the store is
    clean without any repair."""
    rng = random.Random(2)
    acknowledged: dict[int, int] = {}
    for _ in range(KILLS):
        acknowledged |= run_and_kill(root, rng.uniform(0.01, 0.25))
        with Store.open(root, ROW_IDENTITY) as store:
            for chat, n in acknowledged.items():
                found = store.session_ids(str(chat)).tolist()
                assert found in (history(chat, n), history(chat, n + 1))
                # a turn that was committed just before the kill is there for good
                acknowledged[chat] = store.session(str(chat)).n_turns
            store.check_integrity(keys=True)
            assert store.verify().problems == ()
    with Store.open(root, ROW_IDENTITY) as store:
        for info in store.sessions():
            check_rows(store, store.node(store.turns(info.id)[-1].reply_node))
    assert sum(acknowledged.values()) > KILLS


REPLACER = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import numpy as np
    from store_tools import ROW_IDENTITY, moved_rows_of, rows_of
    from towerd.store import Store
    from towerd.tokens import Provenance

    store = Store.open(Path(sys.argv[1]), ROW_IDENTITY)
    os.write(1, b"ready\\n")
    n = len(store.nodes())
    while True:
        n += 1
        ids = np.arange(n, n + 30, dtype=np.int32)
        (node,) = store.insert(ids, "local", [30])
        store.rows.attach_hot([node], moved_rows_of(ids), origin=Provenance.AFTER_MOVED)
        store.rows.write([node])
        os.write(1, f"{n} 0\\n".encode())
        store.rows.attach_hot([node], rows_of(ids))
        store.rows.write([node])
        os.write(1, f"{n} 1\\n".encode())
        store.rows.drop_hot(node)
    """
)


def test_moved_rows_are_there_until_exact_ones_are(root: Path) -> None:
    """Whenever it is killed, a segment has either; each is known as what it is."""
    rng = random.Random(3)
    for _ in range(8):
        done = run_and_kill(root, rng.uniform(0.01, 0.2), REPLACER)
        with Store.open(root, ROW_IDENTITY) as store:
            for n, is_exact in done.items():
                (node,) = store.match(np.arange(n, n + 30, dtype=np.int32), "local").nodes
                assert node.worst_file in (0, Provenance.AFTER_MOVED * (1 - is_exact))
            assert {check_rows(store, node) for node in store.nodes()} <= {0, 30}
            store.check_integrity(keys=True)
            assert store.verify().problems == ()
            store.gc()
            assert len(list(store.state.directory.segments.iterdir())) == len(store.files())
