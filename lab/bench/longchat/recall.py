"""The share of the exact top keys in the loaded pages, and the cost of indexing against prefill."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from lab.bench.longchat.reading import keys_of
from lab.reference.array_keys import ArrayKeys
from towerd.engine.embedded.calibration.scratch import Scratch
from towerd.engine.embedded.context.context import LlamaContext
from towerd.kernels.dci import DciConfig, keys_in, make_dci_tree
from towerd.model.llama_model import LlamaModel
from towerd.retention.base import Positions, Rows
from towerd.retention.icecache import IceCache, IceCacheConfig
from towerd.settings.sources import load

TOP = 16
"""Keys with the largest inner products that a query should find in the loaded pages."""


def recalls(keys: Rows, queries: Rows, budget: int, page_rows: int = 16) -> dict[str, float]:
    """Share of the exact TOP keys in `budget` loaded rows: keys [layers, KV heads, n, d], queries
    [layers, heads, m, d]; mean over heads and queries.

    Ours are chosen by the result of the tree search. Sequential pages are chosen in two ways: by
    Quest's bound (the largest product that any key within the page's smallest and largest values
    could have), and "ranked", by the same rule as ours from the exact order of all keys, which
    takes reading all of them: then only the layout differs."""
    found: dict[str, list[float]] = {"icecache": [], "quest": [], "ranked": []}
    group = queries.shape[1] // keys.shape[1]
    for layer in range(len(keys)):
        for head, rows in enumerate(keys[layer]):
            rows = np.ascontiguousarray(rows)
            tree = make_dci_tree(rows.shape[1], DciConfig(page_rows=page_rows))
            indexed = keys_in(rows)
            tree.add(indexed)
            asking = queries[layer, head * group : (head + 1) * group].reshape(-1, rows.shape[1])
            asking = np.ascontiguousarray(asking)
            exact = np.argsort(-(asking @ rows.T), axis=1, kind="stable")
            nearest = tree.search(indexed, asking, budget, 0, budget)
            pages, in_order = tree.pages(), np.arange(len(rows)) // page_rows
            for i, query in enumerate(asking):
                wanted = exact[i, :TOP]
                ours = pages, page_order(pages, nearest[i][nearest[i] >= 0])
                ranked = in_order, page_order(in_order, exact[i])
                quest = in_order, _quest_order(rows, query, page_rows)
                for name, layout in zip(found, (ours, quest, ranked), strict=True):
                    found[name].append(np.isin(wanted, loaded_tokens(*layout, budget)).mean())
    return {name: float(np.mean(shares)) for name, shares in found.items()}


def loaded_tokens(pages: Positions, order: Positions, budget: int) -> Positions:
    """The rows of whole pages, taken in `order`; those that no longer fit are left out."""
    fills = np.bincount(pages)
    taken: list[int] = []
    room = budget
    for page in dict.fromkeys(order.tolist()):
        if fills[page] <= room:
            taken.append(page)
            room -= int(fills[page])
    return np.flatnonzero(np.isin(pages, taken))


def page_order(pages: Positions, nearest: Positions) -> Positions:
    """The pages of the TOP nearest keys, by descending share of their rows among these; then the
    pages of the further keys, in order."""
    hits = np.bincount(pages[nearest[:TOP]])
    hit = np.flatnonzero(hits)
    shares = hits[hit] / np.bincount(pages)[hit]
    return np.concatenate([hit[np.argsort(-shares, kind="stable")], pages[nearest[TOP:]]])


def _quest_order(rows: Rows, query: Rows, page_rows: int) -> Positions:
    """Pages by descending bound of their keys' products with the query (Tang et al. 2024,
    "Quest")."""
    edges = np.arange(0, len(rows), page_rows)
    low, high = np.minimum.reduceat(rows, edges), np.maximum.reduceat(rows, edges)
    return np.argsort(-np.maximum(low * query, high * query).sum(1), kind="stable")


def index_overhead(model: Path, n: int, head_size: int, n_threads: int) -> dict[str, float]:
    """Seconds to prefill `n` random tokens with llama.cpp, and to index their keys in every layer
    but the first two."""
    config = load(
        {"model": str(model), "batch_size": n, "ubatch_size": min(n, 512), "threads": n_threads}
    )
    loaded = LlamaModel(model, config)
    try:
        context = LlamaContext(loaded, config, n_cells=n, n_seqs=1)
        try:
            ids = np.random.default_rng(0).integers(300, 400, n).astype(np.int32)
            scratch = Scratch(context, 0)
            scratch.evaluate(None, 0, ids[:16], logits=False, rows=False)
            started = time.perf_counter()
            found = scratch.evaluate(None, 0, ids, logits=False, rows=True)
            prefill_s = time.perf_counter() - started
        finally:
            context.close()
    finally:
        loaded.close()
    assert found.rows is not None
    keys = keys_of(found.rows, head_size)
    started = time.perf_counter()
    IceCache(IceCacheConfig()).index(np.arange(n), ArrayKeys(keys), n_threads=n_threads)
    index_s = time.perf_counter() - started
    return {"prefill_s": prefill_s, "index_s": index_s}
