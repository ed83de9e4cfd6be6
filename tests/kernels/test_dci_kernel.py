"""The DCI tree: brute force, soundness under insertion, the reference against C++, bad arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.reference.dci import ReferenceDciTree
from towerd.kernels import dispatch
from towerd.kernels._native import DciKeys, DciTree
from towerd.kernels.dci import DciConfig, directions, keys_at, keys_in, make_dci_tree

F32 = npt.NDArray[np.float32]


class TreeWithKeys:
    """A tree in C++ and the keys in it: searched like the reference, which holds its keys."""

    def __init__(self, n_dims: int, config: DciConfig | None = None) -> None:
        self.tree = make_dci_tree(n_dims, config)
        self.rows: F32 = np.zeros((0, n_dims), np.float32)

    def __len__(self) -> int:
        return len(self.tree)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    @property
    def keys(self) -> DciKeys:
        return keys_in(self.rows)

    def add(self, rows: F32) -> None:
        self.rows = np.concatenate([self.rows, rows])
        self.tree.add(self.keys)

    def search(self, queries: F32, k: int, visits_max: int, beam: int) -> npt.NDArray[np.int64]:
        return self.tree.search(self.keys, queries, k, visits_max, beam)

    def vote(
        self,
        queries: F32,
        k: int,
        visits: int,
        beam: int,
        others: F32,
        there: npt.NDArray[np.uint8],
    ) -> tuple[npt.NDArray[np.int64], F32]:
        return self.tree.vote(self.keys, queries, k, visits, beam, others, there)

    def copy(self) -> TreeWithKeys:
        other = TreeWithKeys(self.rows.shape[1])
        other.tree, other.rows = self.tree.copy(), self.rows
        return other


def check_integrity(tree: TreeWithKeys | ReferenceDciTree) -> None:
    """Every point hangs below one of the next level, and every page holds a key."""
    levels, parents, pages = tree.levels(), tree.parents(), tree.pages()
    below = parents >= 0
    assert (levels[parents[below]] == levels[below] + 1).all()
    assert (levels[~below] == tree.n_levels).all()
    assert (np.bincount(pages, minlength=tree.n_pages) > 0).all()


@pytest.fixture
def both() -> Callable[..., tuple[TreeWithKeys, ReferenceDciTree]]:
    """Makes the same empty tree in C++ and in numpy."""

    def make(n_dims: int, config: DciConfig) -> tuple[TreeWithKeys, ReferenceDciTree]:
        options = (config.ratio, config.page_rows, config.seed, config.visits_max, config.beam)
        theirs = ReferenceDciTree(n_dims, directions(n_dims, config), *options)
        return TreeWithKeys(n_dims, config), theirs

    return make


def clustered(n: int, n_dims: int, seed: int, n_clusters: int = 12) -> F32:
    """Keys around some centres, of many lengths."""
    chance = np.random.default_rng(seed)
    centres = chance.standard_normal((n_clusters, n_dims)) * chance.uniform(0.5, 3, (n_clusters, 1))
    keys = centres[chance.integers(0, n_clusters, n)] + 0.3 * chance.standard_normal((n, n_dims))
    return keys.astype(np.float32)


def brute_force(keys: F32, query: F32, k: int) -> npt.NDArray[np.float64]:
    """The k largest inner products, falling."""
    products = keys.astype(np.float64) @ query.astype(np.float64)
    return np.sort(products)[::-1][:k]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 60),
    n_dims=st.integers(1, 11),
    k=st.integers(1, 70),
    seed=st.integers(0, 1 << 30),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_without_limits_it_is_brute_force(
    n: int, n_dims: int, k: int, seed: int, cuts: list[int]
) -> None:
    """Whatever the keys are and however they arrive, the k largest inner products are found."""
    tree = TreeWithKeys(n_dims, DciConfig(page_rows=4, ratio=0.25, seed=seed))
    keys = clustered(n, n_dims, seed)
    for part in np.split(keys, sorted(min(cut, n) for cut in cuts)):
        tree.add(np.ascontiguousarray(part))
        check_integrity(tree)
    queries = clustered(3, n_dims, seed + 1)
    for query, found in zip(queries, tree.search(queries, k, 0, 0), strict=True):
        assert len(found) == min(k, n)
        assert len(set(found.tolist())) == len(found)
        assert (found >= 0).all()
        products = keys[found].astype(np.float64) @ query.astype(np.float64)
        np.testing.assert_allclose(products, brute_force(keys, query, k), rtol=1e-4, atol=1e-4)


def test_parents_are_the_nearest_promoted_points() -> None:
    """In a tree built at once without limits: the distance between transformed keys."""
    keys = clustered(150, 6, 3)
    tree = TreeWithKeys(6, DciConfig(ratio=0.25, visits_max=0, beam=0))
    tree.add(keys)
    levels, parents = tree.levels(), tree.parents()
    wide = keys.astype(np.float64)
    scale = np.linalg.norm(wide, axis=1).max()
    last = np.sqrt(np.maximum(0, 1 - (wide**2).sum(1) / scale**2))
    points = np.concatenate([wide / scale, last[:, None]], 1)
    assert levels.max() == tree.n_levels >= 3
    for i, (level, parent) in enumerate(zip(levels, parents, strict=True)):
        if level == tree.n_levels:
            assert parent == -1
            continue
        above = np.flatnonzero(levels == level + 1)
        distances = np.linalg.norm(points[above] - points[i], axis=1)
        assert np.linalg.norm(points[parent] - points[i]) <= distances.min() + 1e-5


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_search_for_a_parent_that_meets_none(both: Any, one_by_one: bool) -> None:
    """Limits so narrow that it finds only points without children: every key finds its place."""
    config = DciConfig(ratio=0.5, visits_max=1, beam=1, n_directions=2)
    keys = clustered(200, 5, 8)
    trees = both(5, config)
    for tree in trees:
        for part in np.split(keys, len(keys)) if one_by_one else [keys]:
            tree.add(part)
        check_integrity(tree)
        assert len(tree) == len(keys)
    ours, theirs = trees
    assert ours.parents().tolist() == theirs.parents().tolist()


def test_levels_thin_out_by_the_ratio() -> None:
    tree = TreeWithKeys(2, DciConfig(ratio=0.25, seed=5))
    tree.add(clustered(1500, 2, 1))
    counts = np.bincount(tree.levels())[1:]
    assert counts.sum() == 1500
    for level, count in enumerate(counts[:3]):
        expected = 1500 * 0.25**level * 0.75
        assert abs(count - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("limits", [(0, 0), (8, 3), (3, 1), (1, 0)])
def test_reference_and_cpp_agree(both: Any, limits: tuple[int, int]) -> None:
    """The same tree and the same answers, also where the search is limited and keys grow."""
    config = DciConfig(page_rows=5, ratio=0.2, visits_max=6, beam=2, n_directions=3, seed=9)
    ours, theirs = both(13, config)
    queries = clustered(20, 13, 11)
    for seed, n, factor in ((1, 90, 1.0), (2, 30, 3.0), (3, 1, 0.5), (4, 60, 20.0)):
        keys = clustered(n, 13, seed) * np.float32(factor)
        for tree in (ours, theirs):
            tree.add(keys)
            check_integrity(tree)
        assert ours.levels().tolist() == theirs.levels().tolist()
        assert ours.parents().tolist() == theirs.parents().tolist()
        assert ours.pages().tolist() == theirs.pages().tolist()
        assert (ours.n_levels, ours.n_pages) == (theirs.n_levels, theirs.n_pages)
        found = ours.search(queries, 7, *limits)
        assert found.tolist() == theirs.search(queries, 7, *limits).tolist()
        for row in found:
            assert len(set(row[row >= 0].tolist())) == (row >= 0).sum()


def test_a_limited_search_finds_most() -> None:
    """A few nodes hold nearly all of the nearest keys when keys come in clusters."""
    n = 1200
    keys, queries = clustered(n, 16, 2, 40), clustered(10, 16, 2, 40)
    tree = TreeWithKeys(16, DciConfig(ratio=1 / 8, page_rows=8))
    tree.add(keys)
    found = tree.search(queries, 8, 0, 12)
    exact = tree.search(queries, 8, 0, 0)
    shared = [len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]
    assert np.mean(shared) > 6


def full_votes(
    tree: TreeWithKeys,
    keys: F32,
    queries: F32,
    k: int,
    limits: tuple[int, int],
    others: F32,
    there: npt.NDArray[np.uint8],
) -> dict[int, float]:
    """What the contract of `vote` says, one key and one query at a time."""
    pages = tree.pages()
    found = tree.search(queries, k, *limits)
    hit = {int(pages[i]) for i in found[found >= 0]}
    numbers = [i for i in range(len(tree)) if there[i] and int(pages[i]) in hit]
    votes = dict.fromkeys(numbers, 0.0)
    for query in queries.astype(np.float64):
        scores = [float(keys[i].astype(np.float64) @ query) for i in numbers]
        scores += [float(row.astype(np.float64) @ query) for row in others]
        weights = np.exp((np.array(scores) - max(scores, default=0)) / np.sqrt(keys.shape[1]))
        for i, weight in zip(numbers, weights, strict=False):
            votes[i] = max(votes[i], float(weight / weights.sum()))
    return votes


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 150),
    n_dims=st.sampled_from((1, 4, 13, 64)),
    n_queries=st.integers(0, 70),
    n_others=st.sampled_from((0, 1, 70)),
    k=st.integers(1, 20),
    seed=st.integers(0, 1 << 30),
    limits=st.sampled_from(((0, 0), (0, 3), (4, 2))),
)
@pytest.mark.parametrize("name", ["generic", ""])
def test_votes_are_attention(
    name: str,
    n: int,
    n_dims: int,
    n_queries: int,
    n_others: int,
    k: int,
    seed: int,
    limits: tuple[int, int],
) -> None:
    """Shares of the pages' keys, those that are there, beside others; of the best query each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOWERD_KERNELS", name)
        tree = TreeWithKeys(n_dims, DciConfig(page_rows=4, ratio=0.25))
    keys, queries = clustered(max(n, 1), n_dims, seed)[:n], clustered(70, n_dims, seed + 1)
    tree.add(keys)
    there = (np.random.default_rng(seed).random(n) < 0.8).astype(np.uint8)
    others = clustered(70, n_dims, seed + 2)[:n_others]
    queries = queries[:n_queries]
    numbers, shares = tree.vote(queries, k, *limits, others, there)
    expected = full_votes(tree, keys, queries, k, limits, others, there)
    assert numbers.tolist() == list(expected)
    np.testing.assert_allclose(shares, list(expected.values()), rtol=2e-4, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 120),
    page_rows=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
    cuts=st.lists(st.integers(0, 120), max_size=4),
    is_coarse=st.booleans(),
)
def test_pages_are_never_too_full_and_only_split(
    n: int, page_rows: int, seed: int, cuts: list[int], is_coarse: bool
) -> None:
    """Keys on one page were on one page before, those of one `add` aside. Coarse keys are often
    equal, so that no distance tells them apart."""
    tree = TreeWithKeys(4, DciConfig(page_rows=page_rows, ratio=0.2, seed=seed))
    keys = clustered(n, 4, seed)
    keys = np.round(keys / 3) if is_coarse else keys
    before = tree.pages()
    for part in np.split(keys, sorted(min(cut, n) for cut in cuts)):
        tree.add(np.ascontiguousarray(part))
        check_integrity(tree)
        pages = tree.pages()
        fills = np.bincount(pages, minlength=tree.n_pages)
        assert ((fills > 0) & (fills <= page_rows)).all()
        for page in range(tree.n_pages):
            older = np.flatnonzero(pages[: len(before)] == page)
            assert len(set(before[older])) <= 1
        before = pages


def test_a_full_page_splits_between_two_far_apart() -> None:
    """Two groups that arrive in turn are told apart as soon as they no longer fit."""
    keys = np.array([[x, 0.1 * i] for i in range(4) for x in (-1, 1)], np.float32)
    tree = TreeWithKeys(2, DciConfig(page_rows=6, ratio=1e-9))
    tree.add(keys[:6])
    assert tree.pages().tolist() == [0] * 6
    tree.add(keys[6:])
    assert len({*tree.pages()[::2]}) == len({*tree.pages()[1::2]}) == 1
    assert tree.n_pages == 2
    check_integrity(tree)


def spread(keys: F32, pages: npt.NDArray[np.int64]) -> float:
    """Mean square of the distance of keys of length 1 from the mean of their page."""
    means = np.stack([keys[pages == page].mean(0) for page in range(pages.max() + 1)])
    return float(((keys - means[pages]) ** 2).sum(1).mean())


def test_keys_lie_on_the_nearest_page_not_that_of_their_parent() -> None:
    """Leaves are centred on keys drawn at random: in a tree built at once, most keys are on the
    page with the nearest mean among those near them with room, and promoted keys stay in their
    leaves."""
    keys = clustered(400, 8, 4)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)  # then points are keys
    tree = TreeWithKeys(8, DciConfig(page_rows=16, ratio=1 / 16, visits_max=0, beam=4))
    tree.add(keys)
    levels, parents, pages = tree.levels(), tree.parents(), tree.pages()
    promoted = np.flatnonzero(levels == 2)
    assert len(promoted) > 10
    leaves = np.where(levels == 2, np.arange(len(keys)), parents)
    homes = {page: {int(leaves[i]) for i in np.flatnonzero(pages == page)} for page in set(pages)}
    assert any(len(found) > 1 for found in homes.values()), "a key went over to another leaf"
    by_leaf = np.unique(leaves, return_inverse=True)[1]
    halved = [np.arange((leaves == leaf).sum()) // 16 for leaf in np.unique(leaves)]
    apart = by_leaf.astype(np.int64) * 100
    for i, parts in enumerate(halved):
        apart[by_leaf == i] += parts
    in_leaves = np.unique(apart, return_inverse=True)[1]
    assert tree.n_pages <= len(halved) * 2
    assert spread(keys, pages) < 0.8 * spread(keys, in_leaves)


def test_pages_are_shared_by_similar_keys() -> None:
    keys = clustered(200, 8, 4)
    tree = TreeWithKeys(8, DciConfig(page_rows=6, ratio=1 / 6))
    tree.add(keys[:150])
    before = tree.pages()
    apart = tree.copy()
    tree.add(keys[150:])
    assert len(apart) == 150
    assert apart.pages().tolist() == before.tolist()
    check_integrity(apart)
    fills = np.bincount(tree.pages())
    assert len(fills) == tree.n_pages
    assert fills.min() >= 1
    assert fills.max() <= 6
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    same = tree.pages()[:, None] == tree.pages()
    cosine = np.einsum("id,jd->ij", unit, unit)  # BLAS on arm64 warns of numbers that are fine
    off = ~np.eye(200, dtype=bool)
    assert cosine[same & off].mean() > cosine[~same].mean() + 0.3


def test_edge_cases() -> None:
    """No keys, equal keys, zero keys and a zero query."""
    tree = TreeWithKeys(3, DciConfig(page_rows=2))
    assert tree.search(np.ones((2, 3), np.float32), 4, 0, 0).tolist() == [[-1], [-1]]
    tree.add(np.zeros((0, 3), np.float32))
    assert len(tree) == 0
    tree.add(np.zeros((5, 3), np.float32))
    tree.add(np.ones((4, 3), np.float32))
    check_integrity(tree)
    assert tree.search(np.zeros((1, 3), np.float32), 9, 0, 0).tolist() == [list(range(9))]
    assert tree.search(np.ones((1, 3), np.float32), 4, 0, 0).tolist() == [[5, 6, 7, 8]]


def test_bad_arguments_are_value_errors() -> None:
    """Each is refused by name, and the tree is as it was."""
    tree = make_dci_tree(3)
    keys = keys_in(clustered(20, 3, 1))
    tree.add(keys)
    bad: list[Any] = [
        None,
        3,
        "keys",
        np.ones((2, 4), np.float32),
        np.ones(3, np.float32),
        np.ones((2, 3)),
        np.full((2, 3), np.nan, np.float32),
        np.full((2, 3), np.inf, np.float32),
        np.full((2, 3), 2e15, np.float32),
        np.ones((3, 2), np.float32).T,
        np.ones((2, 3), np.complex64),
    ]
    one, flags = np.ones((1, 3), np.float32), np.ones(20, np.uint8)
    for rows in bad:
        with pytest.raises(ValueError, match="queries"):
            tree.search(keys, rows, 1, 0, 0)
        with pytest.raises(ValueError, match="queries"):
            tree.vote(keys, rows, 1, 0, 0, one, flags)
        with pytest.raises(ValueError, match="others"):
            tree.vote(keys, one, 1, 0, 0, rows, flags)
    not_flags: list[Any] = [None, flags[:19], flags.astype(np.int32), flags[:, None]]
    for those in not_flags:
        with pytest.raises(ValueError, match="there"):
            tree.vote(keys, one, 1, 0, 0, one, those)
        with pytest.raises(ValueError, match="gone"):
            tree.remove(those)
    queries = np.ones((1, 3), np.float32)
    wrong: list[Any] = [0, -1, 1.5, None, "1", 1 << 90]
    for value in wrong:
        with pytest.raises(ValueError, match="^k:"):
            tree.search(keys, queries, value, 0, 0)
        if value != 0:
            with pytest.raises(ValueError, match="visits_max"):
                tree.search(keys, queries, 1, value, 0)
            with pytest.raises(ValueError, match="beam"):
                tree.search(keys, queries, 1, 0, value)
    assert len(tree) == 20


def test_bad_keys_are_value_errors() -> None:
    """Numbers that are not finite, fewer keys than there are, and rows that do not exist."""
    tree, rows = make_dci_tree(3), clustered(20, 3, 1)
    tree.add(keys_in(rows))
    for value in (np.nan, np.inf, 2e15):
        with pytest.raises(ValueError, match="keys: a number"):
            tree.add(keys_in(np.concatenate([rows, np.full((2, 3), value, np.float32)])))
    for keys in (keys_in(rows[:19]), keys_in(rows[:, :2])):
        with pytest.raises(ValueError, match="keys"):
            tree.add(keys)
        with pytest.raises(ValueError, match="keys"):
            tree.search(keys, rows[:1], 1, 0, 0)
    which, numbers = np.zeros(20, np.int32), np.arange(20, dtype=np.int32)
    plane, gone = rows.view(np.uint8), np.where(numbers == 4, -1, numbers).astype(np.int32)
    with pytest.raises(ValueError, match="key 4 has no row"):
        tree.search(keys_at([plane], ["f32"], which, gone, 3), rows[:1], 1, 0, 0)
    bad: list[tuple[str, Any]] = [
        ("which", ([plane], ["f32"], which + 1, numbers, 3)),
        ("which", ([plane], ["f32"], which[:3], numbers, 3)),
        ("numbers", ([plane], ["f32"], which, numbers + 1, 3)),
        ("numbers", ([plane], ["f32"], which, numbers.astype(np.int64), 3)),
        ("planes", ([plane], ["f16"], which, numbers, 3)),
        ("planes", ([plane], ["q8h"], which, numbers, 3)),
        ("formats", ([plane], ["f"], which, numbers, 3)),
        ("formats", ([plane], [], which, numbers, 3)),
        ("n_dims", ([plane], ["f32"], which, numbers, 0)),
    ]
    for name, arguments in bad:
        with pytest.raises(ValueError, match=f"^{name}"):
            keys_at(*arguments)
    assert len(tree) == 20


@pytest.mark.parametrize("name", ["generic", ""])
@pytest.mark.parametrize("format", ["f16", "bf16", "q8_0", "q4_0"])
def test_keys_are_read_in_their_own_format(
    format: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, with other heads beside them: the same tree and answers as over the numbers that they
    stand for."""
    monkeypatch.setenv("TOWERD_KERNELS", name)
    n, n_dims, heads = 300, 64, 3
    rows = clustered(n, n_dims * heads, 5)
    stored = dispatch.transcoded(rows.view(np.uint8), "f32", format)
    values = dispatch.transcoded(stored, format, "f32").view(np.float32)
    width = stored.shape[1] // heads
    planes = [part[:, width : 2 * width] for part in np.split(stored, [100, 170])]
    which = np.repeat(np.arange(3, dtype=np.int32), [100, 70, 130])
    numbers = np.concatenate([np.arange(m, dtype=np.int32) for m in (100, 70, 130)])
    order = np.random.default_rng(2).permutation(n)
    keys = keys_at(planes, [format] * 3, which[order], numbers[order], n_dims)
    plain = np.ascontiguousarray(values[order, n_dims : 2 * n_dims])
    found, expected = make_dci_tree(n_dims), make_dci_tree(n_dims)
    found.add(keys)
    expected.add(keys_in(plain))
    assert found.pages().tolist() == expected.pages().tolist()
    assert found.parents().tolist() == expected.parents().tolist()
    queries, there = clustered(9, n_dims, 6), np.ones(n, np.uint8)
    assert np.array_equal(
        found.search(keys, queries, 20, 0, 4), expected.search(keys_in(plain), queries, 20, 0, 4)
    )
    votes = [
        tree.vote(held, queries, 20, 0, 4, plain[:5], there)
        for tree, held in ((found, keys), (expected, keys_in(plain)))
    ]
    assert np.array_equal(votes[0][0], votes[1][0])
    assert np.array_equal(votes[0][1], votes[1][1])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 120), st.integers(0, 1 << 30), st.floats(0, 1), st.booleans())
def test_what_is_removed_is_neither_found_nor_read(
    n: int, seed: int, share: float, is_narrow: bool
) -> None:
    """Brute force over the keys that are left, and those added afterwards; the rows of the others are
    missing."""
    config = DciConfig(page_rows=4, ratio=0.25, seed=seed, visits_max=5 if is_narrow else 64)
    tree, rows = make_dci_tree(5, config), clustered(2 * n, 5, seed)
    tree.add(keys_in(rows[:n]))
    gone = np.random.default_rng(seed).random(n) < share
    tree.remove(gone.astype(np.uint8))
    assert ((tree.pages() < 0) == gone).all()
    which = np.zeros(2 * n, np.int32)
    numbers = np.arange(2 * n, dtype=np.int32)
    numbers[:n][gone] = -1
    longer = rows * np.float32(3)  # so that all points move
    longer[:n] = rows[:n]
    keys = keys_at([longer.view(np.uint8)], ["f32"], which, numbers, 5)
    tree.add(keys)
    left = np.flatnonzero(numbers >= 0)
    assert (tree.pages()[left] >= 0).all()
    for query in clustered(3, 5, seed + 1):
        found = tree.search(keys, query[None], 7, 0, 0)[0]
        found = found[found >= 0]
        assert np.isin(found, left).all()
        products = longer[found].astype(np.float64) @ query.astype(np.float64)
        expected = brute_force(longer[left], query, 7)
        np.testing.assert_allclose(products, expected, rtol=1e-4, atol=1e-4)
    tree.remove(np.ones(2 * n, np.uint8))
    assert (tree.search(keys, longer[:1], 3, 0, 0) == -1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", 0.0),
        ("ratio", 0.6),
        ("ratio", float("nan")),
        ("ratio", "x"),
        ("page_rows", 0),
        ("seed", -1),
        ("seed", 1 << 70),
        ("visits_max", -1),
        ("beam", None),
        ("n_dims", 0),
        ("n_dims", 99999),
        ("directions", np.ones((0, 4), np.float32)),
        ("directions", np.ones((2, 3), np.float32)),
        ("directions", np.ones((65, 4), np.float32)),
    ],
)
def test_bad_options_are_value_errors(name: str, value: Any) -> None:
    options = asdict(DciConfig()) | {"n_dims": 3, "directions": np.eye(2, 4, dtype=np.float32)}
    del options["n_directions"]
    DciTree(**options)
    with pytest.raises(ValueError, match=f"^{name}"):
        DciTree(**(options | {name: value}))
