"""The index of windows: the reference against C++, what is sampled, what is kept, bad arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.reference.token_index import (
    CONTEXT,
    PLACES_MAX,
    SPAN,
    WINDOW,
    Added,
    ReferenceTokenIndex,
    samples,
)
from towerd.kernels._native import (
    TOKEN_INDEX_CONTEXT,
    TOKEN_INDEX_PLACES,
    TOKEN_INDEX_SHARDS,
    TokenIndex,
    common_after,
    common_before,
)

Ids = npt.NDArray[np.int32]
SEED = 77
KEY = 5
TEXTS = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 400),
    st.sampled_from((1, 2, 30, 30_000)),
    st.one_of(st.none(), st.integers(1, 40)),
    st.booleans(),
)


def text(made: tuple[int, int, int, int | None, bool]) -> Ids:
    """Tokens of few or many words, repeated with a period or not, perhaps with media among them."""
    seed, n, n_words, period, has_media = made
    chance = np.random.default_rng(seed)
    ids = chance.integers(0, n_words, n).astype(np.int32)
    if period is not None:
        ids[period:] = np.resize(ids[:period], n)[period:]
        ids[chance.random(n) < 0.01] = 3
    if has_media:
        ids[chance.random(n) < 0.01] = -7
    return ids


def run(owner: int, ids: Ids, first: int = 0, context: Ids | None = None, **of: int) -> Added:
    before = np.zeros(0, np.int32) if context is None else context
    known = {"key": KEY, "parent": 0, "instead_of": 0} | of
    return (
        *(known["key"], known["parent"], owner, known["instead_of"], first),
        *(before.tobytes(), ids.tobytes()),
    )


def found(index: TokenIndex, ids: Ids, keys: Sequence[int] = (KEY,)) -> list[tuple[int, ...]]:
    return [tuple(row) for row in index.find(keys, ids.tobytes(), 0, len(ids)).tolist()]


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS, st.data())
def test_same_places_as_the_reference(made: list[Any], prompt: Any, data: st.DataObject) -> None:
    """Nodes one below the other, of two scopes; part of a path is looked for."""
    ours, theirs = TokenIndex(SEED), ReferenceTokenIndex(SEED)
    path = np.zeros(0, np.int32)
    for owner, ids in enumerate(map(text, made), 1):
        key = data.draw(st.sampled_from((KEY, 2**64 - 1)))
        instead_of = data.draw(st.integers(0, owner))
        of = {"key": key, "parent": owner - 1, "instead_of": instead_of}
        n_before = data.draw(st.integers(0, len(path)))
        added = run(owner, ids, len(path), path[len(path) - n_before :], **of)
        ours.add([added])
        theirs.add([added])
        path = np.concatenate([path, ids])
    at = data.draw(st.integers(0, len(path)))
    asked = np.concatenate([text(prompt), path[at : at + 300]])
    start = data.draw(st.integers(0, len(asked)))
    for live in (None, [owner for owner in range(1, len(made) + 1) if owner % 2]):
        if live is not None:
            ours.compact(np.array(live, np.int64), 0, TOKEN_INDEX_SHARDS)
            theirs.compact(live)
        args = [2**64 - 1, KEY], asked.tobytes(), start, len(asked)
        assert [tuple(row) for row in ours.find(*args).tolist()] == theirs.find(*args)
        assert len(ours) == len(theirs)
    assert (TOKEN_INDEX_CONTEXT, TOKEN_INDEX_PLACES) == (CONTEXT, PLACES_MAX)


@settings(max_examples=100)
@given(TEXTS, TEXTS, TEXTS, st.integers(0, 30))
def test_texts_that_share_64_tokens_share_a_window(a: Any, b: Any, shared: Any, more: int) -> None:
    """At the same place of what they share, unless all of it repeats with a short period."""
    middle = np.resize(np.maximum(text((shared[0], 64 + more, *shared[2:])), 0), 64 + more)
    one, other = (np.concatenate([text(each), middle, text(each)[:80]]) for each in (a, b))
    n_one, n_other = len(text(a)), len(text(b))
    ends_one = dict(samples(one.tolist(), SEED))
    ends_other = dict(samples(other.tolist(), SEED))
    common = {
        end - n_one
        for end in range(n_one + WINDOW, n_one + len(middle) + 1)
        if end in ends_one and end - n_one + n_other in ends_other
    }
    windows = [middle[i : i + WINDOW].tolist() for i in range(len(middle) - WINDOW + 1)]
    has_period = any(w[p:] == w[:-p] for w in windows for p in range(1, 17))
    assert common or (has_period and set(ends_one.values()) & set(ends_other.values()))


def test_one_window_of_seventeen_is_sampled() -> None:
    ids = np.random.default_rng(1).integers(0, 30_000, 40_000).astype(np.int32)
    index = TokenIndex(SEED)
    index.add([run(1, ids)])
    assert len(index) == pytest.approx(len(ids) * 2 / (SPAN + 1), rel=0.1)
    assert index.nbytes < 3 * len(ids)


@pytest.mark.parametrize("period", [1, 2, 7, 16, 17, 31, 33, 64])
def test_what_repeats_takes_little_room(period: int) -> None:
    ids = np.resize(np.random.default_rng(period).integers(0, 30_000, period), 60_000)
    index = TokenIndex(SEED)
    index.add([run(owner, ids.astype(np.int32)) for owner in range(1, 9)])
    assert len(index) <= PLACES_MAX * period
    assert len(found(index, ids.astype(np.int32))) <= PLACES_MAX * len(ids) * (2 / 16)


def test_the_first_and_the_newest_places_are_known() -> None:
    ids = np.arange(200, dtype=np.int32)
    index = TokenIndex(SEED)
    index.add([run(owner, ids) for owner in range(1, 8)])
    owners = [owner for at, owner, end in found(index, ids) if at == found(index, ids)[0][0]]
    assert owners == [7, 6, 5, 1]
    index.compact(np.array([2, 5, 7], np.int64), 0, TOKEN_INDEX_SHARDS)
    assert {owner for _, owner, _ in found(index, ids)} == {5, 7}
    index.add([run(8, ids), run(9, ids, instead_of=5)])
    assert [row[1] for row in found(index, ids)][:3] == [8, 7, 9]


@pytest.mark.parametrize("n_kept", [0, 1, 2, 3])
def test_what_comes_after_a_compaction(n_kept: int) -> None:
    """Into parts that are as small as they can be."""
    chance = np.random.default_rng(n_kept)
    index = TokenIndex(SEED)
    texts = [chance.integers(0, 30_000, 4000).astype(np.int32) for _ in range(12)]
    for owner, ids in enumerate(texts, 1):
        live = np.arange(owner - min(n_kept, owner - 1), owner)
        index.compact(live, 0, TOKEN_INDEX_SHARDS)
        for first in range(0, len(ids), 100):
            index.add([run(owner, ids[first : first + 100], first, ids[:first], parent=owner)])
            assert found(index, ids[: first + 100]) or not first
        owners = {row[1] for ids in texts for row in found(index, ids)}
        assert owners == {*live.tolist(), owner}


def test_keys_are_apart() -> None:
    ids = np.arange(500, dtype=np.int32)
    index = TokenIndex(SEED)
    index.add([run(1, ids, key=1), run(2, ids, key=2)])
    assert {owner for _, owner, _ in found(index, ids, [2])} == {2}
    assert found(index, ids, [3]) == []
    at = [row[0] for row in found(index, ids, [1, 2])]
    assert at == sorted(at)


def test_what_is_no_token_is_in_no_window() -> None:
    ids = np.arange(400, dtype=np.int32)
    ids[::60] = -9
    index = TokenIndex(SEED)
    index.add([run(1, ids)])
    assert len(index) == 0
    assert found(index, ids) == []


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 100])
def test_common_tokens(n: int) -> None:
    a = np.arange(300, dtype=np.int32)
    b = np.concatenate([a[50 : 50 + n], np.full(3, -1, np.int32)])
    assert common_after(a.tobytes(), 50, b.tobytes(), 0, n) == n
    assert common_after(a.tobytes(), 50, b.tobytes(), 0, n + 3) == n
    c = np.concatenate([np.full(3, -1, np.int32), a[50 : 50 + n]])
    assert common_before(a.tobytes(), 50 + n, c.tobytes(), 3 + n, n) == n
    assert common_before(a.tobytes(), 50 + n, c.tobytes(), 3 + n, n + 3) == n
    with pytest.raises(ValueError, match="n: "):
        common_after(a.tobytes(), 299, a.tobytes(), 0, 2)
    with pytest.raises(ValueError, match="i: "):
        common_before(a.tobytes(), 301, a.tobytes(), 0, 0)


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ([(1, 2, 3)], "runs"),
        (None, "runs"),
        ([(-1, 0, 1, 0, 0, b"", b"")], "key"),
        ([(2**64, 0, 1, 0, 0, b"", b"")], "key"),
        ([(1, -1, 1, 0, 0, b"", b"")], "parent"),
        ([(1, 0, 0, 0, 0, b"", b"")], "owner"),
        ([(1, 0, 2**36, 0, 0, b"", b"")], "owner"),
        ([(1, 0, 1, 0, 2**28, b"", b"")], "first"),
        ([(1, 0, 1, 0, 0, b"1234", b"")], "context"),
        ([(1, 0, 1, 0, 0, b"", b"123")], "ids"),
        ([(1, 0, 1, 0, 0, b"", np.zeros(1, np.int32))], "ids"),
    ],
)
def test_bad_runs(bad: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        TokenIndex(SEED).add(bad)


def test_bad_arguments() -> None:
    index = TokenIndex(SEED)
    with pytest.raises(ValueError, match="seed"):
        TokenIndex(-1)
    for start, stop, name in ((0, 3, "stop"), (2, 1, "start"), (-1, 1, "start")):
        with pytest.raises(ValueError, match=name):
            index.find([1], bytes(8), start, stop)
    with pytest.raises(ValueError, match="live"):
        index.compact(np.zeros(2, np.int32), 0, 1)
    with pytest.raises(ValueError, match="stop"):
        index.compact(np.zeros(2, np.int64), 0, TOKEN_INDEX_SHARDS + 1)
