"""IceCache's choice of positions, against full attention, and the layout of its pages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import retained
from hypothesis import given
from hypothesis import strategies as st

from lab.reference.array_keys import ArrayKeys
from towerd.kernels._native import DciKeys
from towerd.kernels.dci import DciConfig, keys_at
from towerd.retention import Positions, View
from towerd.retention.icecache import IceCache, IceCacheConfig, passed_on
from towerd.retention.layout import cluster_order

UNLIMITED = IceCacheConfig(
    sink=2, window=3, keys_max=1 << 16, layer_first=0, tree=DciConfig(page_rows=1, beam=1 << 16)
)


def keys_of(view: View) -> np.ndarray:
    assert isinstance(view.keys, ArrayKeys)
    return view.keys.values


def full_votes(view: View) -> np.ndarray:
    """float64[layers, KV heads, n]: the largest attention of each head's queries on every position."""
    assert view.queries is not None
    keys_of_all = keys_of(view)
    votes = np.zeros(keys_of_all.shape[:3])
    group = view.queries.shape[1] // keys_of_all.shape[1]
    for layer, head in np.ndindex(votes.shape[:2]):
        keys = keys_of_all[layer, head].astype(np.float64)
        for query in view.queries[layer, head * group : (head + 1) * group].reshape(
            -1, keys.shape[1]
        ):
            share = np.exp(keys @ query.astype(np.float64) / np.sqrt(keys.shape[1]))
            np.maximum(votes[layer, head], share / share.sum(), out=votes[layer, head])
    return votes


def check_choice(view: View, kept: Positions, votes: np.ndarray, room: int) -> None:
    """Sink and window, and between them the positions with the most votes."""
    inside = np.isin(view.positions[2 : view.n - 3], kept)
    assert len(kept) == room + 5
    assert inside.sum() == room
    if room:
        votes = votes[2 : view.n - 3]
        assert votes[inside].min() >= votes[~inside].max() - 1e-5


@given(st.integers(0, 2**31), st.integers(6, 70), st.integers(0, 30), st.sampled_from((1, 3)))
def test_with_single_keys_and_no_limits_it_is_full_attention(
    seed: int, n: int, room: int, step: int
) -> None:
    """Pages of one key, every key searched for: the positions with most attention stay."""
    view, n_max = retained.random_view(seed, n), 5 + room
    kept = IceCache(replace(UNLIMITED, layer_step=step)).keep(view, n_max)
    if n <= n_max:
        assert kept.tolist() == view.positions.tolist()
        return
    check_choice(view, kept, full_votes(view)[::step].sum((0, 1)), room)


@given(st.integers(0, 2**31), st.integers(6, 70), st.integers(0, 30), st.booleans())
def test_each_group_has_what_its_own_heads_attend_to(
    seed: int, n: int, room: int, by_head: bool
) -> None:
    """By layer the votes of its heads together; of three layers the first and the last have trees, and
    the one between them takes the choice of the first."""
    view, n_max = retained.random_view(seed, n), 5 + room
    layers, heads = keys_of(view).shape[:2]
    assert layers == 3
    shape = layers, heads if by_head else 1
    kept = IceCache(replace(UNLIMITED, layer_step=2)).keep_groups(view, n_max, shape)
    assert kept.shape == (*shape, min(n, n_max))
    assert (kept[1] == kept[0]).all()
    votes = full_votes(view)[[0, 0, 2]]
    votes = votes if by_head else votes.sum(1, keepdims=True)
    for of_group, place in zip(kept.reshape(-1, kept.shape[2]), np.ndindex(shape), strict=True):
        if n <= n_max:
            assert of_group.tolist() == view.positions.tolist()
        else:
            check_choice(view, of_group, votes[place], room)


def test_a_layer_without_trees_has_the_choice_of_the_nearest() -> None:
    """Of seven layers those from the third on, every third: 2 and 5."""
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((7, 2, 300, 8), dtype=np.float32)
    queries = rng.standard_normal((7, 4, 2, 8), dtype=np.float32)
    view = View(np.arange(300, dtype=np.int64), 300, keys=ArrayKeys(keys), queries=queries)
    policy = IceCache(IceCacheConfig(window=20, keys_max=8, layer_step=3))
    kept = policy.keep_groups(view, 60, (7, 2))
    assert [(kept[i] == kept[2]).all() for i in range(7)] == [True] * 4 + [False] * 3
    assert [(kept[i] == kept[5]).all() for i in range(7)] == [False] * 4 + [True] * 3
    assert (kept[2, 0] != kept[2, 1]).any()
    with pytest.raises(ValueError, match="groups of shape"):
        policy.keep_groups(view, 60, (6, 2))


def told(n: int, needles: dict[tuple[int, int], int], n_heads: int = 4) -> View:
    """Small keys, except for one position per (layer, head), whose key is that head's query."""
    rng = np.random.default_rng(4)
    keys = 0.1 * rng.standard_normal((4, 2, n, 16), dtype=np.float32)
    queries = 0.01 * rng.standard_normal((4, n_heads, 1, 16), dtype=np.float32)
    for (layer, head), position in needles.items():
        query = rng.standard_normal(16, dtype=np.float32)
        queries[layer, head, 0] = 3 * query
        keys[layer, head * 2 // n_heads, position] = 3 * query
    live = np.arange(n) >= n - 40
    return View(np.arange(n, dtype=np.int64), n, keys=ArrayKeys(keys), queries=queries, live=live)


def test_each_head_of_a_group_brings_back_what_it_looks_for() -> None:
    """Positions that are not live, from two heads that share a KV head and one that does not."""
    view = told(400, {(2, 0): 50, (2, 1): 131, (3, 3): 222})
    policy = IceCache(IceCacheConfig.for_budget(60))
    assert policy.can_recall
    kept = policy.keep(view, 60)
    assert {50, 131, 222} <= set(kept.tolist())
    assert len(kept) == 60


def test_layers_without_trees_have_no_vote() -> None:
    """The first two layers, and with reuse all but every third."""
    view = told(400, {(0, 0): 50, (2, 1): 131, (3, 3): 222})
    kept = IceCache(IceCacheConfig(window=10, keys_max=8, layer_step=3)).keep(view, 40)
    assert 131 in kept
    assert 50 not in kept
    assert 222 not in kept
    assert list(IceCacheConfig().anchors(1)) == [0]


def test_the_index_grows_with_the_chat() -> None:
    """Indexing piece by piece gives the same result as indexing at once."""
    view = told(400, {(2, 0): 50, (3, 2): 222})
    policy = IceCache(IceCacheConfig(window=20, keys_max=16))
    for n in (60, 61, 200, 333):
        policy.index(np.arange(4, n), ArrayKeys(keys_of(view)[:, :, 4:n]))
    branch = policy.fork()
    assert {50, 222} <= set(policy.keep(view, 60).tolist())
    shorter = View(
        view.positions[:300], 300, keys=ArrayKeys(keys_of(view)[:, :, :300]), queries=view.queries
    )
    kept = branch.keep(shorter, 60)
    assert {50, 222} <= set(kept.tolist())
    assert kept.max() == 299


def test_what_is_forgotten_may_come_again_with_other_keys() -> None:
    """A branch of the chat has other tokens at the same positions; the index does not grow by what
    is forgotten again and again."""
    needles = {(2, 0): 250, (3, 3): 222}
    view = told(400, needles)
    policy = IceCache(IceCacheConfig.for_budget(60))
    other = told(400, {})
    policy.index(other.positions[4:380], ArrayKeys(keys_of(other)[:, :, 4:380]))
    policy.forget(np.arange(200, 400))
    assert {250, 222} <= set(policy.keep(view, 60).tolist())
    for _ in range(8):
        policy.forget(np.arange(100, 400))
        assert {250, 222} <= set(policy.keep(view, 60).tolist())
    whole = 400 * policy.index_bytes(4, 2, 16)
    assert 0 < policy.n_bytes <= 2 * whole


def test_threads_change_nothing() -> None:
    """The same positions however many threads search, and however the chat was edited before."""
    view = told(400, {(2, 0): 50, (2, 1): 131, (3, 3): 222})
    kept = []
    for n_threads in (1, 2, 5):
        policy = IceCache(replace(IceCacheConfig.for_budget(60), n_threads=n_threads))
        policy.index(np.arange(4, 300), ArrayKeys(keys_of(view)[:, :, 4:300]), n_threads=n_threads)
        policy.truncate(200)
        kept.append(policy.keep(view, 60).tolist())
    assert kept[0] == kept[1] == kept[2]
    assert {50, 131, 222} <= set(kept[0])


class Elsewhere:
    """Keys that are not an array: three pieces, in which they stand in another order."""

    def __init__(self, keys: np.ndarray) -> None:
        self.shape: tuple[int, ...] = keys.shape
        n = keys.shape[2]
        order = np.random.default_rng(n).permutation(n)
        pieces = np.array_split(order, 3)
        self._pieces = [np.ascontiguousarray(keys[:, :, piece]) for piece in pieces]
        self._which, self._row = np.zeros(n, np.int32), np.zeros(n, np.int32)
        for i, piece in enumerate(pieces):
            self._which[piece], self._row[piece] = i, np.arange(len(piece))

    def read(self, layer: int, head: int, wanted: np.ndarray) -> np.ndarray:
        rows = [self._pieces[self._which[i]][layer, head, self._row[i]] for i in wanted]
        return np.array(rows, np.float32).reshape(-1, self.shape[3])

    def at(self, layer: int, head: int, wanted: np.ndarray) -> DciKeys:
        planes = [piece[layer, head].view(np.uint8) for piece in self._pieces]
        which = np.where(wanted < 0, 0, self._which[wanted]).astype(np.int32)
        row = np.where(wanted < 0, -1, self._row[wanted]).astype(np.int32)
        return keys_at(planes, ["f32"] * 3, which, row, self.shape[3])


@given(st.integers(0, 2**31), st.integers(20, 70))
def test_keys_may_lie_anywhere(seed: int, n: int) -> None:
    view = retained.random_view(seed, n)
    config = IceCacheConfig(sink=2, window=3, keys_max=8, layer_first=0)
    found = IceCache(config).keep(replace(view, keys=Elsewhere(keys_of(view))), 12)
    assert np.array_equal(found, IceCache(config).keep(view, 12))


def test_without_queries_the_last_ones_stay() -> None:
    view = told(100, {})
    assert view.queries is not None
    kept = IceCache(IceCacheConfig()).keep(replace(view, queries=view.queries[:, :, :0]), 40)
    assert kept.tolist() == [0, 1, 2, 3, *range(64, 100)]


@pytest.mark.parametrize("name", ["keys_max", "layer_step", "window", "n_threads"])
def test_bad_parameters(name: str) -> None:
    with pytest.raises(ValueError, match="IceCache|window"):
        replace(IceCacheConfig(), **dict[str, Any]({name: 0}))


def test_keys_and_queries_must_go_together() -> None:
    view = told(100, {})
    assert view.queries is not None
    policy = IceCache(IceCacheConfig())
    for wrong in (view.queries[:3], view.queries[:, :3], view.queries[..., :8]):
        with pytest.raises(ValueError, match="do not go with"):
            policy.keep(replace(view, queries=wrong), 40)


def n_reads(order: Positions, chosen: Positions, gap_max: int = 0) -> int:
    """The number of contiguous reads that fetch the indices `chosen` from a file written in
    `order`; gaps of up to `gap_max` unneeded rows are read through."""
    slot = np.empty(len(order), np.int64)
    slot[order] = np.arange(len(order))
    places = np.sort(slot[np.unique(chosen)])
    return int(len(places) > 0) + int((np.diff(places) > gap_max + 1).sum())


def test_similar_keys_are_read_together() -> None:
    """Every position stands in the file once; what one query looks for lies in few runs."""
    rng = np.random.default_rng(2)
    centres = rng.standard_normal((30, 2, 2, 8), dtype=np.float32)
    cluster = rng.integers(0, 30, 600)
    noise = 0.2 * rng.standard_normal((600, 2, 2, 8), dtype=np.float32)
    keys = np.ascontiguousarray((centres[cluster] + noise).transpose(1, 2, 0, 3))
    order = cluster_order(keys)
    assert sorted(order.tolist()) == list(range(600))
    in_order = np.arange(600)
    runs, runs_before = [], []
    for wanted in range(30):
        chosen = np.flatnonzero(cluster == wanted)
        runs.append(n_reads(order, chosen))
        runs_before.append(n_reads(in_order, chosen))
        assert n_reads(order, chosen, gap_max=8) <= runs[-1]
    assert sum(runs) <= sum(runs_before) / 3
    assert n_reads(order, np.array([], np.int64)) == 0
    assert n_reads(in_order, np.array([3, 4, 5, 9])) == 2
    assert n_reads(in_order, np.array([3, 4, 5, 9]), gap_max=3) == 1


@given(st.data())
def test_votes_are_passed_on_to_what_follows(data: st.DataObject) -> None:
    """As counted by hand; votes do not cross gaps between positions."""
    gaps = data.draw(st.lists(st.integers(1, 3), max_size=12))
    positions = np.cumsum(np.array(gaps, np.int64))
    draw = st.lists(st.integers(0, 9), min_size=len(gaps), max_size=len(gaps))
    votes = np.array(data.draw(draw), np.float32)
    followers = data.draw(st.integers(0, 5))
    expected = [
        max(
            votes[i] * (1 - (p - q) / (followers + 1))
            for i, q in enumerate(positions)
            if 0 <= p - q <= followers and at - i == p - q
        )
        for at, p in enumerate(positions)
    ]
    found = passed_on(votes, positions, followers)
    np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 1), (5, 2)])
def test_each_group_gets_what_its_own_queries_look_for(shape: tuple[int, int]) -> None:
    """Against votes by every key: layers with trees by their own queries, the others like the nearest."""
    rng = np.random.default_rng(7)
    layers, kv_heads, n, size, n_max = 5, 2, 300, 16, 60
    keys = rng.normal(size=(layers, kv_heads, n, size)).astype(np.float32)
    queries = 3 * rng.normal(size=(layers, 2 * kv_heads, 2, size)).astype(np.float32)
    config = IceCacheConfig(window=10, keys_max=n, layer_first=1, layer_step=2)
    policy = IceCache(replace(config, tree=replace(config.tree, visits_max=10_000)))
    view = View(np.arange(n) * 2, 2 * n, keys=ArrayKeys(keys), queries=queries)
    found = policy.keep_groups(view, n_max, shape)
    assert found.shape == (*shape, n_max)
    scores = np.einsum("lhmd,lhnd->lhmn", queries, np.repeat(keys, 2, axis=1)) / np.sqrt(size)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    best = weights.reshape(layers, kv_heads, -1, n).max(axis=2)
    if shape[1] == 1:
        best = best.sum(axis=1, keepdims=True)
    for layer in range(layers):
        anchor = {0: 1, 1: 1, 2: 1, 3: 3, 4: 3}[layer]
        for head in range(shape[1]):
            mine = found[layer, head] // 2
            assert mine[:4].tolist() == [0, 1, 2, 3]
            assert mine[-10:].tolist() == list(range(290, 300))
            wanted = 4 + np.argsort(-best[anchor, head, 4:290])[: n_max - 14]
            assert len(np.intersect1d(mine, wanted)) >= 0.9 * len(wanted)


def test_others_may_ask_for_its_size_while_it_grows() -> None:
    """What they see is its size before or after a change."""
    keys = np.random.default_rng(3).normal(size=(4, 2, 4000, 32)).astype(np.float32)
    policy, sizes, seen = IceCache(IceCacheConfig(layer_first=0)), [0], []
    with ThreadPoolExecutor(1) as threads:
        for n in range(500, 4001, 500):
            positions = np.arange(n)
            work = threads.submit(policy.index, positions, ArrayKeys(keys[:, :, :n]))
            while not work.done():
                seen.append(policy.n_bytes)
            work.result()
            sizes.append(policy.n_bytes)
    assert sizes == sorted(sizes)
    assert set(seen) <= set(sizes)
