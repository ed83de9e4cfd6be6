"""Where media stand among ids, told from the ids alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from towerd.media_ids import is_token, spans_of, whole

FIRST, LATER = -(1 << 31) + 5, -7
TEXT = st.lists(st.integers(0, 1000), max_size=4)
MEDIUM = st.integers(1, 5).map(lambda n: [FIRST] + [LATER] * (n - 1))


@given(st.lists(st.one_of(TEXT, MEDIUM), max_size=8))
def test_spans(parts: list[list[int]]) -> None:
    """Media may follow each other without a token between them."""
    ids: list[int] = []
    wanted: list[tuple[int, int]] = []
    for part in parts:
        if part and part[0] < 0:
            wanted.append((len(ids), len(ids) + len(part)))
        ids += part
    array = np.array(ids, np.int32)
    assert list(spans_of(array)) == wanted
    assert (~is_token(array)).sum() == sum(end - start for start, end in wanted)
    inside = {n: start for start, end in wanted for n in range(start + 1, end)}
    for n in range(len(ids) + 1):
        assert whole(spans_of(array), n) == inside.get(n, n)


def test_the_end_of_a_medium() -> None:
    """What is cut off at its beginning is a span, too."""
    assert spans_of(np.array([LATER, LATER, 3, FIRST], np.int32)) == ((0, 2), (3, 4))
