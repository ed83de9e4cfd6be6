"""`towerctl lab bench footprint`: bytes on disk per session when sessions share a hierarchy of bases.

The mix is that of Table 1 of the Towers paper: one platform base, 10 communities, 50 bots, 1,000
tokens each, and a transcript of 1,000 tokens per session. The store, its files, catalog and
formats are the real ones; the rows are random numbers of a small layout, so that fixed costs per
segment weigh more than they would for a real model.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.bench.disk import disk_bytes
from lab.bench.plot import new_figure, require
from towerd.cli.bench.harness.report import Report
from towerd.kernels.formats import BY_NAME
from towerd.slots.compose import state_size
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity
from towerd.slots.rows import KVRows
from towerd.store import Store, Turn
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids

_SEGMENT = 1000
_COMMUNITIES, _BOTS = 10, 50
_REPLY = 300
_N_VOCAB = 32000
_SLOT_HEAD_BYTES = 28
"""A slot file's magic, version, token count and the frame of its token list."""
_SETTLED_S = 2.0
_PAPER_MB = {500: 2152, 5000: 1137}
"""Table 1: MB per session with 4,096 MB of f16 rows each, no quantization."""
_PAPER_ROWS_MB = 4096


@dataclass(slots=True)
class GrowingStore:
    """A store to which sessions are added."""

    store: Store
    tiers: Tiers
    layout: KVLayout
    rng: np.random.Generator
    bots: list[Ids]
    n: int = 0
    n_vocab: int = _N_VOCAB

    def tokens(self, n: int) -> Ids:
        return self.rng.integers(300, self.n_vocab, n).astype(np.int32)

    def add_session(self) -> None:
        """A bot's prompt, what the user said, and the reply: 4,000 tokens with rows."""
        own = self.tokens(_SEGMENT)
        prompt = np.concatenate([self.bots[self.n % len(self.bots)], own[:-_REPLY]])
        ids = np.concatenate([prompt, own[-_REPLY:]])
        turn = Turn("local", None, prompt, own[-_REPLY:], len(ids), time.time())
        self.store.commit_turn(turn)
        self.fill(ids)
        self.n += 1

    def fill(self, ids: Ids) -> None:
        """Give random rows to the nodes on the path of `ids` that have none, and write them."""
        for gap in self.tiers.gaps(ids, "local"):
            self.tiers.accept(gap, random_rows(self.layout, self.rng, gap.p0, gap.p1))
        self.tiers.flush()

    def settle(self) -> None:
        """Wait until the shrinker has nothing left to do."""
        since, last = time.monotonic(), -1
        while time.monotonic() - since < _SETTLED_S:
            now = self.tiers.stats()["warm_bytes"]
            if now != last:
                since, last = time.monotonic(), now
            time.sleep(0.1)


async def run(
    model: Path | None, quick: bool, level_formats: str, plot_path: Path | None
) -> Report:
    """Grow one store and measure it at 50, 500 and 5,000 sessions; quick: 50 and 200."""
    if plot_path is not None:
        require(plot_path)
    report = Report("footprint", f"1 platform, {_COMMUNITIES} communities, {_BOTS} bots")
    report.figures["level_formats"] = level_formats
    curve: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        root = Path(folder) / "store"
        for n in (50, 200) if quick else (50, 500, 5000):
            population = _open(root, LevelFormats.parse(level_formats))
            try:
                while population.n < n:
                    population.add_session()
                population.settle()
            finally:
                population.tiers.close()
                population.store.close()
            curve[n] = disk_bytes(root) / n
    _figures(report, curve)
    if plot_path is not None:
        plot(curve, report.figures["native_bytes_per_token"], plot_path)
    return report


def small_layout() -> KVLayout:
    """One layer of 512 numbers a plane, in f16."""
    plane = Plane(BY_NAME["f16"].ggml_type, 512)
    return KVLayout((plane,), (plane,))


def _open(root: Path, formats: LevelFormats) -> GrowingStore:
    """The store with its bases; sessions that it already has are counted."""
    layout = small_layout()
    row_identity = RowIdentity("footprint", "llama", "bench", {}, (), layout, False, False, False)
    store = Store.open(root, row_identity)
    tiers = Tiers(
        store,
        layout,
        v_trans=False,
        hot_bytes=64 << 20,
        warm_bytes=1 << 40,
        policy="lru",
        forced=formats,
        shrink_after_s=0.0,
    )
    n = int(store.stats()["sessions"])
    population = GrowingStore(store, tiers, layout, np.random.default_rng(n), [], n)
    population.bots = _add_bases(population)
    return population


def _add_bases(population: GrowingStore) -> list[Ids]:
    """Add platform, communities and bots, the same each time; returns the bots' prompts."""
    rng = np.random.default_rng(17)

    def base(name: str, above: Ids, level: int) -> Ids:
        own = rng.integers(300, _N_VOCAB, _SEGMENT).astype(np.int32)
        ids = np.concatenate([above, own])
        population.store.bases.add(name, ids, "local", level, False)
        population.fill(ids)
        return ids

    platform = base("platform", np.zeros(0, np.int32), 0)
    communities = [base(f"community {i}", platform, 1) for i in range(_COMMUNITIES)]
    return [base(f"bot {i}", communities[i % _COMMUNITIES], 2) for i in range(_BOTS)]


def random_rows(layout: KVLayout, rng: np.random.Generator, p0: int, p1: int) -> KVRows:
    """Normal random numbers for the positions [p0, p1)."""

    def plane(row_bytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        values = rng.standard_normal((p1 - p0, row_bytes // 2), np.float32)
        return values.astype(np.float16).view(np.uint8)

    positions = np.arange(p0, p1, dtype=np.int32)
    k = tuple(plane(each.row_bytes) for each in layout.k)
    v = tuple(plane(each.row_bytes) for each in layout.v)
    return KVRows(layout, positions, k, v)


def slot_file_bytes(n_tokens: int) -> int:
    """Bytes of llama-server's slot file of so many tokens, of the small layout."""
    return _SLOT_HEAD_BYTES + 4 * n_tokens + state_size(small_layout(), n_tokens, 1)


def _figures(report: Report, curve: dict[int, float]) -> None:
    figures, token_bytes = report.figures, small_layout().token_bytes
    figures["native_bytes_per_token"] = token_bytes
    slot = figures["slot_file_bytes_per_session"] = slot_file_bytes(4 * _SEGMENT)
    n_bases = 1 + _COMMUNITIES + _BOTS
    for n, n_bytes in curve.items():
        figures[f"per_session_bytes_{n}"] = n_bytes
        shared = token_bytes * _SEGMENT * (1 + n_bases / n)
        figures[f"sharing_alone_ratio_{n}"] = slot / shared
        figures[f"ratio_{n}"] = slot / n_bytes
        if n in _PAPER_MB:
            figures[f"paper_table_1_ratio_{n}"] = _PAPER_ROWS_MB / _PAPER_MB[n]
    n = 500 if 500 in curve else max(curve)
    figures["warm_ratio"] = slot / curve[n]
    report.target("warm_ratio", least=6)


def plot(curve: dict[int, float], token_bytes: int, path: Path) -> None:
    """Write bytes per session against sessions, beside the 1/N law of Theorem 14."""
    figure = new_figure(6.5, 4.5)
    axes = figure.subplots()
    sessions = np.array(list(curve), float)
    measured = np.array(list(curve.values())) / (token_bytes * _SEGMENT)
    axes.loglog(sessions, measured, "o", label="measured, all files")
    # least squares of a + b / N, relative to each point
    design = np.stack([np.ones_like(sessions), 1 / sessions], axis=1) / measured[:, None]
    a, b = np.linalg.lstsq(design, np.ones_like(measured), rcond=None)[0]
    line = np.geomspace(sessions.min() / 2, sessions.max() * 4, 100)
    axes.loglog(line, a + b / line, "-", label=f"{a:.2f} + {b:.1f} / N")
    axes.loglog(line, 1 + (1 + _COMMUNITIES + _BOTS) / line, "--", label="shared, native")
    axes.axhline(4, linestyle=":", label="one slot file each")
    axes.set_xlabel("sessions")
    axes.set_ylabel("1,000 native tokens per session")
    axes.legend()
    figure.savefig(path, dpi=150)
