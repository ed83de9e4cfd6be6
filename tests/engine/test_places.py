"""Places of tokens behind media, against a list that is counted one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerd.engine.embedded.context.places import Places
from towerd.media_ids import Span, n_places, spans_of, whole
from towerd.tokens import Ids

SIGN, LATER, AT_ONE_PLACE = -(1 << 31), -7, 1 << 29
TEXT = st.lists(st.integers(0, 1000), min_size=1, max_size=4).map(lambda ids: (ids, 0))


def shared(n: int, places: int) -> tuple[list[int], int]:
    return [SIGN | AT_ONE_PLACE | places, *[LATER] * (n - 1)], places


PICTURE = st.tuples(st.integers(2, 6), st.integers(1, 6)).map(lambda each: shared(*each))
SOUND = st.integers(1, 4).map(lambda n: ([SIGN | 5, *[LATER] * (n - 1)], 0))
"""A token of it has a place each."""
Parts = Sequence[tuple[list[int], int]]
PARTS = st.lists(st.one_of(TEXT, PICTURE, SOUND), min_size=1, max_size=8)


def counted(parts: Parts) -> tuple[Ids, list[int]]:
    """The ids, and the place of each and of the next one."""
    ids: list[int] = []
    places: list[int] = []
    at = 0
    for part, n_shared in parts:
        ids += part
        places += [at] * len(part) if n_shared else range(at, at + len(part))
        at += n_shared or len(part)
    return np.array(ids, np.int32), [*places, at]


@given(PARTS, st.data())
def test_places(parts: Parts, data: st.DataObject) -> None:
    """Added in pieces of any length, cut and forked at any token."""
    ids, wanted = counted(parts)
    n = len(ids)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    places, at = Places(), 0
    for end in (*cuts, n):
        places.extend(ids[at:end], at)
        at = end
    spans = spans_of(ids)
    check(places, wanted, spans)
    cut = data.draw(st.integers(0, n))
    branch = places.fork(cut)
    places.truncate(cut)
    for each in (places, branch):
        each.extend(ids[cut:], cut)
        check(each, wanted, spans)


def check(places: Places, wanted: list[int], spans: tuple[Span, ...]) -> None:
    n = len(wanted) - 1
    for at in range(n + 1):
        if whole(spans, at) == at:
            assert places.of(at) == wanted[at]
    for p0 in range(n):
        for p1 in range(p0 + 1, n + 1):
            found = places.between(p0, p1)
            assert (list(range(p0, p1)) if found is None else found.tolist()) == wanted[p0:p1]
            first, end = places.whole(p0, p1)
            assert first <= p0 < p1 <= end
            assert wanted[first:end].count(wanted[p0]) == wanted[:n].count(wanted[p0])


def test_within_a_medium() -> None:
    """No token but the first one has a place of its own there."""
    places = Places(counted([([1], 0), shared(4, 2), ([2], 0)])[0])
    assert [places.of(n) for n in (0, 1, 5, 6)] == [0, 1, 3, 4]
    with pytest.raises(AssertionError):
        places.of(3)


def test_what_an_id_says() -> None:
    assert n_places(SIGN | AT_ONE_PLACE | 77) == 77
    assert n_places(SIGN | 77) is None
    assert n_places(LATER) is None
    assert n_places(5) is None
