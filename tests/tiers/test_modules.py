"""Finding modules in prompts, and the tokens of a text wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import ROW_IDENTITY, assert_same_rows, rows_of

from towerd.errors import InvalidRequest, StoreError
from towerd.model.llama_model import LlamaModel
from towerd.model.vocab import Vocab
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config
from towerd.slots.layout import KVLayout
from towerd.store import Module, Store
from towerd.tiers.manager import Tiers
from towerd.tiers.module_text import TOKENS_MIN, inner_ids, surrounded
from towerd.tiers.modules import Modules
from towerd.tokens import Ids

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
WIDE = replace(ROW_IDENTITY, layout=LAYOUT)
MODULE = Module(1, "", 15.0, ((0, 4),), 0.001, 0.9, row_identity=WIDE.digest().hex())


def _ids(n: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(2, 50, n).astype(np.int32)


LONG, SHORT = _ids(80, 1), _ids(40, 2)
SAME_START = np.concatenate([LONG[:30], _ids(10, 3)])


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with Store.open(tmp_path / "store", WIDE) as store:
        made = Tiers(
            store, LAYOUT, v_trans=False, hot_bytes=1 << 30, warm_bytes=1 << 30, policy="lru"
        )
        yield made
        made.close()


def add(tiers: Tiers, name: str, own: Ids, scope: str = "local", public: bool = False) -> None:
    path = np.concatenate([np.array([1], np.int32), own])
    tiers.store.bases.add(name, path, scope, 0, public, None, MODULE)


def test_all_are_found_and_longer_ones_win(tiers: Tiers) -> None:
    modules = Modules(tiers)
    prompt = np.concatenate([_ids(5, 9), LONG, SAME_START, _ids(3, 8), SHORT, SHORT])
    assert modules.find(prompt, "local") == []
    add(tiers, "inside", LONG[20:60])
    add(tiers, "short", SHORT)
    assert [(p.base.name, p.at) for p in modules.find(prompt, "local")] == [
        ("inside", 25),
        ("short", 128),
        ("short", 168),
    ]
    add(tiers, "long", LONG)
    add(tiers, "same", SAME_START)
    found = modules.find(prompt, "local")
    assert [(p.base.name, p.at, p.end) for p in found] == [
        ("long", 5, 85),
        ("same", 85, 125),
        ("short", 128, 168),
        ("short", 168, 208),
    ]
    tiers.store.bases.remove("long", "local")
    assert modules.find(prompt, "local")[0].base.name == "inside"
    assert modules.find(prompt[:20], "local") == []


def test_scopes(tiers: Tiers) -> None:
    add(tiers, "a", LONG, "a")
    add(tiers, "p", SHORT, "x", public=True)
    modules = Modules(tiers)
    prompt = np.concatenate([LONG, SHORT])
    assert [p.base.name for p in modules.find(prompt, "a")] == ["a", "p"]
    assert [p.base.name for p in modules.find(prompt, "b")] == ["p"]


def test_ordinary_bases_are_no_modules(tiers: Tiers) -> None:
    tiers.store.bases.add("b", LONG, "local", 0, False)
    assert Modules(tiers).find(LONG, "local") == []


def test_rows_of_a_module(tiers: Tiers) -> None:
    """All of them, wherever they are; or the name of the one that lacks some."""
    add(tiers, "m", LONG)
    modules = Modules(tiers)
    (placed,) = modules.find(np.concatenate([SHORT, LONG]), "local")
    with pytest.raises(StoreError, match="'m' are gone"):
        modules.rows(placed, "local")
    rows = rows_of(placed.ids, 0, LAYOUT)
    (gap,) = tiers.gaps(placed.ids, "local")
    tiers.accept(gap, rows)
    tiers.flush()
    found, n_hot = modules.rows(placed, "local")
    assert n_hot == len(LONG)
    assert_same_rows(found, rows.slice(1, 81))
    for node in tiers.store.nodes():
        tiers.store.rows.drop_hot(node)
    found, n_hot = modules.rows(placed, "local")
    assert n_hot == 0
    assert_same_rows(found, rows.slice(1, 81))


_rng = np.random.default_rng(5)
OWN = {name: _rng.integers(2, 4, n).astype(np.int32) for name, n in (("m", 40), ("n", 33))}
OTHER = {name: _rng.integers(2, 4, n).astype(np.int32) for name, n in (("x", 7), ("y", 25))}
"""Ids from a tiny alphabet, so that windows repeat."""
PIECES = OWN | OTHER | {"half": OWN["m"][:20], "rest": OWN["m"][20:]}


@pytest.fixture(scope="module")
def two_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Modules]:
    folder = tmp_path_factory.mktemp("two")
    with Store.open(folder / "store", replace(ROW_IDENTITY, layout=LAYOUT)) as store:
        tiers = Tiers(store, LAYOUT, v_trans=False, hot_bytes=1, warm_bytes=1, policy="lru")
        for name, ids in OWN.items():
            add(tiers, name, ids)
        yield Modules(tiers)
        tiers.close()


@settings(max_examples=100, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(PIECES)), max_size=8))
def test_found_is_what_stands_there(two_modules: Modules, names: list[str]) -> None:
    """Every occurrence, and none that is not one."""
    prompt = np.concatenate([np.zeros(0, np.int32), *(PIECES[name] for name in names)])
    taken = np.zeros(len(prompt), bool)
    expected = []
    for name, own in OWN.items():
        for at in range(len(prompt) - len(own) + 1):
            span = slice(at, at + len(own))
            if np.array_equal(prompt[span], own) and not taken[span].any():
                taken[span] = True
                expected.append((at, name))
    found = two_modules.find(prompt, "local")
    assert [(p.at, p.base.name) for p in found] == sorted(expected)


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    model = LlamaModel(bundled_model(), Config(), vocab_only=True)
    yield Vocab(model.ptr)
    model.close()


TEXT = (
    "Once upon a time there was a little girl named Lily. She liked to play in the park. "
    "One day, she saw a big red ball.\n"
)


def inner(vocab: Vocab, text: str) -> Ids:
    return inner_ids([vocab.tokenize(each, False, True) for each in surrounded(text)])


@pytest.mark.parametrize("before", ["", "Hello", "Read this:\n\n", "<doc>", "A story. ", " "])
@pytest.mark.parametrize("after", ["", "The end.", "\n\nWhat is red?", "</doc>", " And"])
def test_the_inner_tokens_are_in_every_prompt(vocab: Vocab, before: str, after: str) -> None:
    ids = inner(vocab, TEXT).tolist()
    prompt = vocab.tokenize(before + TEXT + after, True, True).tolist()
    assert any(prompt[at : at + len(ids)] == ids for at in range(len(prompt)))
    alone = vocab.tokenize(TEXT, False, True)
    assert len(ids) >= len(alone) - 4


def test_short_texts_are_refused(vocab: Vocab) -> None:
    with pytest.raises(InvalidRequest, match=f"at least {TOKENS_MIN} tokens .* has"):
        inner(vocab, "Once upon a time.")
    with pytest.raises(InvalidRequest, match="this one has 0"):
        inner(vocab, "")
