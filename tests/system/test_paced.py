"""Background work stops for requests, at the next piece of it, and is not kept from ending."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import numpy as np
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, write_all
from waiting import until

from towerd.slots.layout import NATIVE, KVLayout
from towerd.store import FormatRequest, Store
from towerd.store.segments.segment_writer import CHUNK_BYTES
from towerd.system.paced import POLL_S, PacedExecutor


def test_nothing_begins_while_requests_run() -> None:
    """One piece may be at work when a request comes; the others wait until it has ended."""
    is_quiet, began = threading.Event(), list[int]()
    is_quiet.set()
    paced = PacedExecutor()
    paced.is_quiet = is_quiet.is_set
    paced.begin()
    wait([paced.submit(began.append, i) for i in range(3)])
    is_quiet.clear()
    later = [paced.submit(began.append, 3), paced.submit(began.append, 4)]
    assert not wait(later, timeout=3 * POLL_S).done
    assert began == [0, 1, 2]
    is_quiet.set()
    wait(later)
    assert began == [0, 1, 2, 3, 4]
    paced.shutdown()


def test_closing_waits_for_no_request() -> None:
    paced, done = PacedExecutor(), list[int]()
    paced.is_quiet = lambda: False
    paced.begin()
    paced.submit(done.append, 1)
    began = time.monotonic()
    paced.shutdown()
    assert done == [1]
    assert time.monotonic() - began < 9


def test_rows_are_encoded_between_requests(tmp_path: Path) -> None:
    """A file stays as it is while a request runs that came in the middle: what encodes it asks before every
    few MB, which take some milliseconds, and only asks as long as it is told to wait."""
    plane = plane_of("f16", 2048)
    layout = KVLayout((plane,) * 8, (plane,) * 8)
    ids = np.arange(4096, dtype=np.int32)
    with Store.open(tmp_path / "store", replace(ROW_IDENTITY, layout=layout)) as store:
        (node,) = store.insert(ids, "local", [len(ids)])
        write_all(store, node)
        before = node.file
        assert before is not None
        asked, is_quiet, n_asked = threading.Event(), threading.Event(), 0

        def quiet() -> bool:
            nonlocal n_asked
            n_asked += 1
            if n_asked == 8:
                asked.set()
            return n_asked < 8 or is_quiet.is_set()

        store.rows.encoding.is_quiet = quiet
        request = FormatRequest(0, len(ids), "q5h")
        thread = threading.Thread(target=store.rows.reencode, args=(before, [request]))
        thread.start()
        assert asked.wait(60)
        until(lambda: n_asked > 12)
        assert node.file is before
        is_quiet.set()
        n_waited = n_asked
        thread.join()
        assert 8 + n_asked - n_waited >= before.nbytes // CHUNK_BYTES
        assert node.file is not before
        assert node.file is not None
        assert [run.format for run in node.file.runs] == ["q5h"]
        assert before.runs[0].format == NATIVE
