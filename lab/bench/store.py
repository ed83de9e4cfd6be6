"""`towerctl bench store`: load time, lookup time and size of 100,000 synthetic segments.

`load_checked_s`: as after a kill, when the whole catalog is checked; `rebuild_s`: without a
catalog, when it is rebuilt from the journal."""

from __future__ import annotations

import gc
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from towerd.cli.bench.harness.report import Report
from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store, Turn
from towerd.tokens import Ids

_PROMPT_TOKENS = 8000
_SEGMENT_TOKENS = 80
_LOOKUPS = 5000
_COMMITS = 200


async def run(model: Path | None, quick: bool) -> Report:
    """Build the store in a temporary directory and measure it."""
    n_segments = 10_000 if quick else 100_000
    report = Report("store", "synthetic")
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        root = Path(folder) / "store"
        chats = _build(root, n_segments)
        _measure_load(report, root)
        with Store.open(root, _row_identity()) as store:
            _measure_lookup(report, store, chats)
            _measure_commit(report, store, chats)
    report.target("load_s", most=n_segments / 100_000)
    report.target("lookup_p99_ms", most=1.0)
    return report


def _row_identity() -> RowIdentity:
    plane = Plane(BY_NAME["f16"].ggml_type, 1024)
    layout = KVLayout((plane,) * 16, (plane,) * 16)
    return RowIdentity("bench", "llama", "bench", {}, (), layout, False, False, False)


def _build(root: Path, n_segments: int) -> list[Ids]:
    """Chats of 8,000 tokens in segments of 80 over one base; a tenth of each is shared."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 32000, _PROMPT_TOKENS // 10).astype(np.int32)
    ends = list(range(_SEGMENT_TOKENS, _PROMPT_TOKENS + 1, _SEGMENT_TOKENS))
    n_own = len(ends) - len(base) // _SEGMENT_TOKENS
    chats = []
    with Store.open(root, _row_identity()) as store:
        for _ in range(-(-n_segments // n_own)):
            own = rng.integers(0, 32000, _PROMPT_TOKENS - len(base)).astype(np.int32)
            chats.append(np.concatenate([base, own]))
            store.insert(chats[-1], "local", ends)
    return chats


def _measure_load(report: Report, root: Path) -> None:
    gc.collect()
    started = time.perf_counter()
    store = Store.open(root, _row_identity())
    load_s = time.perf_counter() - started
    stats = store.stats()
    store.close()
    tracemalloc.start()
    store = Store.open(root, _row_identity())
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    store.close()
    n = int(stats["segments"])
    report.figures |= {
        "segments": n,
        "load_s": load_s,
        "load_checked_s": _load_without(root, "catalog.sqlite.clean"),
        "rebuild_s": _load_without(root, "catalog.sqlite"),
        "catalog_bytes_per_segment": int(stats["catalog_bytes"]) / n,
        "journal_bytes_per_segment": int(stats["journal_bytes"]) / n,
        "trie_bytes_per_segment": memory / n,
        "bytes_per_segment": (int(stats["catalog_bytes"]) + memory) / n,
    }


def _load_without(root: Path, name: str) -> float:
    (root / name).unlink()
    started = time.perf_counter()
    store = Store.open(root, _row_identity())
    load_s = time.perf_counter() - started
    store.close()
    return load_s


def _measure_lookup(report: Report, store: Store, chats: list[Ids]) -> None:
    rng = np.random.default_rng(1)
    times = []
    for _ in range(_LOOKUPS):
        prompt = chats[int(rng.integers(len(chats)))].copy()
        cut = int(rng.integers(len(prompt) // 2, len(prompt) + 1))
        prompt[cut:] = 1  # where a client edited its history
        started = time.perf_counter()
        match = store.match(prompt, "local")
        times.append(time.perf_counter() - started)
        assert match.n >= cut
    report.figures |= {
        "lookup_p50_ms": float(np.quantile(times, 0.5)) * 1e3,
        "lookup_p99_ms": float(np.quantile(times, 0.99)) * 1e3,
    }


def _measure_commit(report: Report, store: Store, chats: list[Ids]) -> None:
    rng = np.random.default_rng(2)
    times = []
    for i in range(_COMMITS):
        reply = rng.integers(0, 32000, 100).astype(np.int32)
        prompt = chats[i % len(chats)]
        turn = Turn("local", None, prompt, reply, len(prompt) + 99, time.time())
        started = time.perf_counter()
        store.commit_turn(turn)
        times.append(time.perf_counter() - started)
    report.figures |= {
        "commit_p50_ms": float(np.quantile(times, 0.5)) * 1e3,
        "commit_p99_ms": float(np.quantile(times, 0.99)) * 1e3,
    }
