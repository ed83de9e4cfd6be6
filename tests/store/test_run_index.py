"""Runs of a prompt that are stored anywhere: against brute force, who may find what, and at what cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import OTHER_MODEL, ROW_IDENTITY, insert_in_vain, make_hot
from waiting import until

from towerd.errors import StoreError
from towerd.store import Node, Store
from towerd.store.catalog.shared.broker import CatalogBroker
from towerd.store.tree import run_index
from towerd.store.tree.run_index import RUN_TOKENS, VISIT_TOKENS, VISITS_MAX, StoredRun
from towerd.store.tree.scope import public_of

Ids = npt.NDArray[np.int32]
Usable = Callable[[Node], bool]
SCOPES = ("alice", "bob", "alice~lora@1.0", "public", "public~lora@1.0")


def words(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 30_000, n).astype(np.int32)


def anyone(node: Node) -> bool:
    return True


@pytest.fixture(autouse=True)
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same windows are sampled in every run: those that begin before a shared text are other windows in each
    path, and may be all that is found of it first."""
    monkeypatch.setattr("secrets.randbits", lambda _: 20261128)


def runs(
    store: Store, ids: Ids, scope: str = "alice", start: int = 0, usable: Usable = anyone
) -> list[StoredRun]:
    """What is found; each run holds what it promises."""
    found = store.runs(ids, scope, start, len(ids), usable=usable)
    end = start
    for run in found:
        assert end <= run.at
        assert run.n >= RUN_TOKENS
        assert is_stored(run, ids, scope, usable)
        assert is_longest(run, ids, scope, end, usable)
        end = run.end
    assert end <= len(ids)
    return found


def may_use(node: Node | None, scope: str, usable: Usable) -> bool:
    return bool(
        node is not None and node.p1 and node.scope in (scope, public_of(scope)) and usable(node)
    )


def is_stored(run: StoredRun, ids: Ids, scope: str, usable: Usable) -> bool:
    mine = ids[run.at : run.end]
    theirs = run.node.prefix_ids()[run.start : run.start + run.n]
    nodes = [node for node in run.node.path() if node.p1 > run.start]
    return (
        mine.tolist() == theirs.tolist()
        and bool((mine >= 0).all())
        and run.node.p0 < run.start + run.n <= run.node.p1
        and not run.node.removed
        and all(may_use(node, scope, usable) for node in nodes)
    )


def is_longest(run: StoredRun, ids: Ids, scope: str, low: int, usable: Usable) -> bool:
    """Whether it goes on neither to the left, from `low` on, nor to the right."""
    path, stop = run.node.prefix_ids(), run.start + run.n
    before = next((each for each in run.node.path() if each.p0 < run.start <= each.p1), None)
    left = run.at > low and may_use(before, scope, usable)
    if left and ids[run.at - 1] == path[run.start - 1] and ids[run.at - 1] >= 0:
        return False
    if run.end == len(ids) or ids[run.end] < 0:
        return True
    if stop < run.node.p1:
        return bool(path[stop] != ids[run.end])
    below = [child for child in run.node.children if child.first == ids[run.end]]
    return not any(may_use(child, scope, usable) for child in below)


def longest_shared(store: Store, ids: Ids, scope: str, usable: Usable) -> npt.NDArray[np.int64]:
    """For each position of a prompt, the most tokens before it that are stored in one piece."""
    longest = np.zeros(len(ids) + 1, np.int64)
    for leaf in store.nodes():
        visible = (scope, public_of(scope))
        if leaf.scope not in visible or any(child.scope in visible for child in leaf.children):
            continue
        shared = np.zeros(len(ids) + 1, np.int64)
        for node in leaf.path():
            for token in np.frombuffer(node.ids, np.int32).tolist():
                agrees = (ids == token) & (token >= 0) & usable(node)
                shared[1:] = np.where(agrees, shared[:-1] + 1, 0)
                longest = np.maximum(longest, shared)
    return longest


def assert_nothing_is_left_out(
    store: Store, ids: Ids, scope: str, found: Sequence[StoredRun], usable: Usable
) -> None:
    longest = longest_shared(store, ids, scope, usable)
    bounds = [(0, 0), *((run.at, run.end) for run in found), (len(ids), len(ids))]
    for (_, low), (high, _) in zip(bounds, bounds[1:], strict=False):
        inside = np.minimum(longest[low : high + 1], np.arange(high + 1 - low))
        assert inside.max(initial=0) < RUN_TOKENS


@contextmanager
def fresh_store() -> Iterator[Store]:
    with TemporaryDirectory() as root, Store.open(Path(root), ROW_IDENTITY) as opened:
        yield opened


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_all_that_brute_force_finds(seed: int) -> None:
    """Texts of the same pieces under five scopes, branches, splits, removals, pieces without rows. No
    piece is stored more often than places of one window are known."""
    chance = np.random.default_rng(seed)
    pieces = [words(int(chance.integers(20, 150)), seed + i) for i in range(8)]
    pieces[0][::50] = -5
    deck = [piece for piece in pieces for _ in range(4)]
    chance.shuffle(deck)
    stored: list[Ids] = []
    pinned: list[int] = []
    with fresh_store() as store:
        while len(deck) > 3:
            text = np.concatenate([words(5, seed + len(deck)), *(deck.pop() for _ in range(3))])
            if stored and chance.random() < 0.5:
                before = stored[int(chance.integers(len(stored)))]
                text = np.concatenate([before[: int(chance.integers(len(before)))], text])
            stored.append(text)
            scope = str(chance.choice(SCOPES))
            ends = sorted({*chance.integers(1, len(text), 3).tolist(), len(text)})
            leaf = store.insert(text, scope, ends)[-1]
            if chance.random() < 0.8:
                store.pins.add(leaf.id)
                pinned.append(leaf.id)
            if chance.random() < 0.2:
                store.gc()
            if chance.random() < 0.3 and pinned:
                store.pins.remove(pinned.pop(int(chance.integers(len(pinned)))))
            without = {node.id for node in store.nodes() if chance.random() < 0.2}

            def usable(node: Node, without: set[int] = without) -> bool:
                return node.id not in without

            asked = [pieces[i] for i in chance.integers(0, len(pieces), 3)]
            cut = stored[int(chance.integers(len(stored)))]
            asked.append(cut[int(chance.integers(len(cut))) :])
            prompt = np.concatenate([words(7, seed), *asked])
            scope = str(chance.choice(SCOPES))
            found = runs(store, prompt, scope, usable=usable)
            assert_nothing_is_left_out(store, prompt, scope, found, usable)
        store.check_integrity(keys=True)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(64, 500), st.integers(64, 500))
def test_what_repeats_is_found(seed: int, period: int, n_stored: int, n_asked: int) -> None:
    beat = np.resize(words(period, seed), 600)
    with fresh_store() as store:
        stored = np.concatenate([words(90, seed + 1), beat[:n_stored], words(90, seed + 2)])
        store.insert(stored, "alice", [100, 130, len(stored)])
        prompt = np.concatenate([words(33, seed + 3), beat[:n_asked], words(40, seed + 4)])
        found = runs(store, prompt)
        assert found
        assert_nothing_is_left_out(store, prompt[: found[0].end], "alice", found[:1], anyone)


def test_a_change_in_the_middle(store: Store) -> None:
    """What follows it is one run of the conversation that the prompt continues, also after others made
    branches of it, which cut its nodes, and after the conversation went."""
    text = words(3000)
    (leaf,) = store.insert(text, "alice", [3000])
    prompt = np.concatenate([text[:1000], words(30, 1), text[1010:], words(50, 2)])
    assert runs(store, prompt, start=1000) == [StoredRun(1030, 1010, 1990, leaf)]
    ends = [(500, 1), (2500, 2), (1500, 3), (700, 4), (2000, 5)]
    for at, seed in ends:
        branch = store.insert(np.concatenate([text[:at], words(40, seed)]), "alice", [at + 40])[-1]
        store.pins.add(branch.id)
    assert runs(store, prompt, start=1000) == [StoredRun(1030, 1010, 1990, leaf)]
    store.gc()
    assert leaf.removed
    (run,) = runs(store, prompt, start=1000)
    assert (run.at, run.start, run.n, run.node.p1) == (1030, 1010, 1490, 2500)


def test_scopes_are_apart(store: Store) -> None:
    """A run is found in the own scope and in public nodes made under the same adapters."""
    texts = {scope: words(200, i) for i, scope in enumerate(SCOPES)}
    for scope, text in texts.items():
        store.insert(text, scope, [100, 200])
    prompt = np.concatenate([words(9, 77), *texts.values()])
    for asking, visible in {
        "alice": ("alice", "public"),
        "bob": ("bob", "public"),
        "carol": ("public",),
        "alice~lora@1.0": ("alice~lora@1.0", "public~lora@1.0"),
        "public": ("public",),
    }.items():
        assert tuple(run.node.scope for run in runs(store, prompt, asking)) == visible


def test_from_a_public_base_into_an_own_chat(store: Store) -> None:
    """A run goes on below a public node in nodes of its scope or in public ones, whichever are longer,
    and begins in the base for a window behind it."""
    base, own, other = words(150, 1), words(150, 2), words(150, 3)
    store.insert(base, "public", [150])
    public = store.insert(np.concatenate([base, own[:20], other]), "public", [320])[-1]
    mine = store.insert(np.concatenate([base, own]), "alice", [300])[-1]
    theirs = store.insert(np.concatenate([base, own]), "bob", [300])[-1]
    prompt = np.concatenate([words(30, 4), base[40:], own])
    assert [(run.n, run.node) for run in runs(store, prompt)] == [(260, mine)]
    assert [(run.n, run.node) for run in runs(store, prompt, "bob")] == [(260, theirs)]
    assert [run.n for run in runs(store, prompt, "carol")] == [130]
    prompt = np.concatenate([words(30, 4), base[40:], own[:20], other])
    assert [(run.n, run.node) for run in runs(store, prompt)] == [(280, public)]


def test_a_run_ends_before_a_node_without_rows(store: Store) -> None:
    text = words(600)
    path = store.insert(text, "alice", [200, 400, 600])
    prompt = np.concatenate([words(10, 1), text[50:]])
    assert [run.n for run in runs(store, prompt)] == [550]
    for without, lengths in ((path[0], [400]), (path[1], [150, 200]), (path[2], [350])):

        def usable(node: Node, without: Node = without) -> bool:
            return node is not without

        assert [run.n for run in runs(store, prompt, usable=usable)] == lengths
    assert store.runs(prompt, "alice", 0, len(prompt)) == []
    make_hot(store, path[1])
    (run,) = store.runs(prompt, "alice", 0, len(prompt))
    assert (run.n, run.node) == (350, path[1])


def test_no_run_has_a_medium(store: Store) -> None:
    text = words(400)
    text[150:160] = -((1 << 30) + 5)
    store.insert(text, "alice", [400])
    prompt = np.concatenate([words(10, 1), text[20:]])
    assert [(run.start, run.n) for run in runs(store, prompt)] == [(20, 130), (160, 240)]
    assert store.runs(prompt, "alice", 50, 300, 200) == []


def test_the_longest_is_taken_then_the_newest(store: Store) -> None:
    text = words(500)
    leaves = [
        store.insert(np.concatenate([words(20, i), text[:n]]), "alice", [20 + n])[-1]
        for i, n in enumerate((300, 400, 400, 200), 1)
    ]
    prompt = np.concatenate([words(10, 9), text])
    assert [(run.n, run.node) for run in runs(store, prompt)] == [(400, leaves[2])]


def test_nothing_of_a_failed_insert_is_found(store: Store) -> None:
    text = words(500)
    (leaf,) = store.insert(text, "alice", [500])
    more = np.concatenate([text[:300], words(200, 1)])
    store.index_runs()
    with pytest.raises(StoreError):
        insert_in_vain(store, more, "alice", [100, 300, 500])
    assert runs(store, np.concatenate([words(9, 2), text])) == [StoredRun(9, 0, 500, leaf)]
    assert [run.n for run in runs(store, np.concatenate([words(9, 2), more]))] == [300]


def test_it_is_built_again_after_a_start(root: Path) -> None:
    """In a thread, without a file; what came since the start is found at once."""
    texts = [words(3000, i) for i in range(60)]
    with Store.open(root, ROW_IDENTITY) as store:
        for text in texts:
            store.insert(text, "alice", list(range(100, 3001, 100)))
    files = {path.name for path in root.rglob("*")}
    with Store.open(root, ROW_IDENTITY) as store:
        assert not store.run_index.is_behind
        late = store.insert(words(200, 99), "alice", [200])[-1]
        store.index_runs()
        until(lambda: not store.run_index.is_behind)
        for text in texts:
            assert [run.n for run in runs(store, np.concatenate([words(9, 88), text]))] == [3000]
        late = store.insert(words(200, 98), "alice", [200])[-1]
        assert [run.node for run in runs(store, np.concatenate([[3], words(200, 98)]))] == [late]
        n_tokens = sum(node.n for node in store.nodes())
        assert store.run_index.nbytes < 4 * n_tokens + 50_000
    assert {path.name for path in root.rglob("*")} <= files


def test_a_closed_store_ends_the_building(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        store.insert(words(200_000), "alice", list(range(100, 200_001, 100)))
    store = Store.open(root, ROW_IDENTITY)
    store.index_runs()
    store.close()
    with pytest.raises(StoreError):
        store.runs(words(9), "alice", 0, 9)


def test_what_other_processes_enter_is_found(root: Path) -> None:
    broker = CatalogBroker(root)
    sides = [
        Store.open(root, model, catalog_fd=broker.connect().socket.detach())
        for model in (ROW_IDENTITY, OTHER_MODEL, replace(OTHER_MODEL, model_hash="third"))
    ]
    try:
        text = words(500)
        prompt = np.concatenate([words(9, 1), text])
        assert runs(sides[1], prompt) == []
        sides[0].insert(text, "alice", [500])
        (run,) = runs(sides[1], prompt)
        assert (run.n, run.node.p0) == (500, 0)
        branch = sides[0].insert(np.concatenate([text[:300], words(90, 2)]), "alice", [390])[-1]
        (run,) = runs(sides[1], prompt)
        assert (run.n, run.node.p0) == (500, 300)
        sides[0].pins.add(branch.id)
        sides[0].gc()
        assert [run.n for run in runs(sides[1], prompt)] == [300]
        assert [run.n for run in runs(sides[2], prompt)] == [300]
    finally:
        for side in sides:
            side.close()
        broker.close()


def test_removed_nodes_leave_the_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "STALE_MIN", 5)
    kept, late = words(400, 1), words(400, 2)
    store.pins.add(store.insert(kept, "alice", [400])[-1].id)
    for i in range(30):
        store.insert(words(2000, 10 + i), "alice", [2000])
    runs(store, kept)
    before = store.run_index.nbytes
    store.gc()
    store.index_runs()
    store.pins.add(store.insert(late, "alice", [400])[-1].id)
    until(lambda: not store.run_index.is_behind)
    assert store.run_index.nbytes < before / 4
    for text in (kept, late):
        assert [run.n for run in runs(store, np.concatenate([words(9), text]))] == [400]


def pieces_of(text: Ids, n: int, n_pieces: int) -> Ids:
    """Pieces that are `n` tokens of a text each, an unknown token after each."""
    cut = [np.append(text[i * n : (i + 1) * n], 40_000 + i) for i in range(n_pieces)]
    return np.concatenate(cut).astype(np.int32)


@pytest.mark.parametrize("n_tokens", [8000, 100_000])
def test_hostile_prompts_cost_a_bounded_search(store: Store, n_tokens: int) -> None:
    """Whatever is stored and asked, so many nodes are compared with, and no more."""
    text = words(100_000)
    beats = [np.resize(words(period, period), 20_000) for period in (1, 2, 7, 16, 17, 33, 64)]
    for i in range(5):
        for stored in (text, *beats):
            for scope in ("alice", "public"):
                own = np.concatenate([words(3, i), stored])
                store.insert(own, scope, [len(own)])
    long = np.resize(words(40, 5), 9990)
    store.insert(long, "alice", list(range(10, 9991, 10)))
    store.index_runs()
    until(lambda: not store.run_index.is_behind)
    n_asked = 0

    def counted(node: Node) -> bool:
        nonlocal n_asked
        n_asked += 1
        return True

    hostile = [np.resize(beat, n_tokens) for beat in (*beats, long)]
    for beat in beats:
        broken = np.resize(beat, n_tokens)
        broken[40::80] = 31_000
        hostile.append(broken)
    hostile += [pieces_of(text, n, n_tokens // (n + 1)) for n in (40, 64, 90)]
    for prompt in hostile:
        n_asked = 0
        store.runs(prompt, "alice", 0, len(prompt), usable=counted)
        assert n_asked <= VISITS_MAX + len(prompt) // VISIT_TOKENS
    assert store.runs(pieces_of(text, 64, 50), "alice", 0, 50 * 65, usable=anyone)
