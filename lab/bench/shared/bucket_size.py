"""What chats take in a bucket: those of four system prompts, pushed by the code that a daemon pushes with.

The store, its formats, the records and the marks are the real ones; rows are random numbers of a small layout, so that
what an object costs beside its rows weighs more than it would for a real model.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.progress import track

from lab.bench.footprint.hierarchy import GrowingStore, slot_file_bytes, small_layout
from towerd.cli.bench.harness.models import vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cold.coding import Coding, VocabularySource
from towerd.cold.cold_tier import ColdTier
from towerd.models.bundled import bundled_model
from towerd.roaming.roaming import Roaming
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store, Turn
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.manager import Tiers
from towerd.tiers.shared.bucket import open_bucket
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids

CHATS = 500
_BASES, _BASE_TOKENS = 4, 1000
_SAID, _REPLY, _TURNS = 110, 40, 2
_FORMATS = "0=q5h,1=q5h,2=q5h"
"""About what calibration finds for SmolLM2."""


async def measure_bucket(report: Report, folder: Path) -> None:
    """Push the chats into a folder, and add up what is in it."""
    (bucket := folder / "bucket").mkdir()
    tokens = _BASE_TOKENS + _TURNS * (_SAID + _REPLY)
    with Store.open(folder / "store", _row_identity()) as store:
        population = _opened(store)
        sessions = [_talk(population, number) for number in range(CHATS)]
        population.settle()
        n_rows = await _push(population, sessions, f"file://{bucket}/towers")
        population.tiers.close()
    sizes = [(path.parts, path.stat().st_size) for path in bucket.rglob("*") if path.is_file()]
    n_bytes = sum(size for _, size in sizes)
    report.figures |= {
        "chats": CHATS,
        "chat_tokens": tokens,
        "chat_rows": n_rows / CHATS,
        "slot_file_bytes": slot_file_bytes(tokens),
        "bucket_bytes_per_chat": n_bytes / CHATS,
        "objects_per_chat": len(sizes) / CHATS,
    }
    for kind in ("objects", "marks", "sessions"):
        of_kind = sum(size for parts, size in sizes if kind in parts)
        report.figures[f"bucket_{kind}_bytes_per_chat"] = of_kind / CHATS
    report.figures["bucket_vs_slot_files"] = n_bytes / (CHATS * slot_file_bytes(tokens))
    report.target("bucket_vs_slot_files", most=1 / 6)


def _row_identity() -> RowIdentity:
    return RowIdentity("bucket", "llama", "bench", {}, (), small_layout(), False, False, False)


def _opened(store: Store) -> GrowingStore:
    """The store with its bases."""
    tiers = Tiers(
        store,
        small_layout(),
        v_trans=False,
        hot_bytes=64 << 20,
        warm_bytes=1 << 40,
        policy="lru",
        forced=LevelFormats.parse(_FORMATS),
        shrink_after_s=0.0,
    )
    n_vocab = vocab_size(bundled_model())
    rng = np.random.default_rng(1)
    population = GrowingStore(store, tiers, small_layout(), rng, [], n_vocab=n_vocab)
    for number in range(_BASES):
        ids = population.tokens(_BASE_TOKENS)
        store.bases.add(f"base {number}", ids, "local", 1, False)
        population.fill(ids)
        population.bots.append(ids)
    return population


def _talk(population: GrowingStore, number: int) -> str:
    """Hold a chat over one of the bases; its id."""
    ids: Ids = population.bots[number % _BASES]
    session = None
    for _ in range(_TURNS):
        prompt = np.concatenate([ids, population.tokens(_SAID)])
        reply = population.tokens(_REPLY)
        ids = np.concatenate([prompt, reply])
        turn = Turn("local", session, prompt, reply, len(ids), time.time())
        session = population.store.commit_turn(turn).session_id
        population.fill(ids)
    assert session is not None
    return session


async def _push(population: GrowingStore, sessions: list[str], url: str) -> int:
    """Push all; the tokens that have rows in the bucket."""
    store, model = population.store, bundled_model()
    shared = SharedTier(store, open_bucket(url), bytes(32), "near", has_rows=True)
    cold = ColdTier(store, Coding(lambda: VocabularySource(model, "bucket")), freeze_after_s=-1)
    roaming = Roaming(shared, population.tiers, cold)
    try:
        pushed = [
            await roaming.push_session(session, "local")
            for session in track(sessions, "chats are pushed", transient=True)
        ]
    finally:
        roaming.stop()
        await roaming.close()
        await cold.close()
    return sum(each["rows"] for each in pushed)
