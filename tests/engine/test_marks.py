"""Where boundary states are taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.engine.embedded.restore.marks import MARKS_MAX, plan_marks

NUMBERS = st.integers(min_value=0, max_value=40_000)


def test_a_bare_prompt_is_marked_before_its_last_token() -> None:
    assert plan_marks(0, 100, 512, [], []) == (99,)
    assert plan_marks(99, 100, 512, [], []) == ()
    assert plan_marks(0, 1, 512, [], []) == ()


def test_the_end_of_the_last_message_stands_for_the_end() -> None:
    """Three tokens of the next one's head cost less than another state."""
    assert plan_marks(0, 100, 512, [40, 97], []) == (40, 97)


def test_where_prompts_part_is_always_marked() -> None:
    assert plan_marks(0, 1000, 512, [], [301, 302]) == (301, 302, 999)
    assert plan_marks(301, 1000, 256, [], [301]) == (512, 999)


def test_the_past_is_sparse() -> None:
    marks = plan_marks(0, 32_768, 512, [], [])
    gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    assert gaps[-2] == 512
    assert gaps[0] >= 2048
    assert len(marks) <= MARKS_MAX


@settings(deadline=None, max_examples=60)
@given(
    start=NUMBERS, more=st.integers(2, 40_000), every=st.integers(16, 2048),
    messages=st.lists(NUMBERS, max_size=60), branches=st.lists(NUMBERS, max_size=3),
)  # fmt: skip
def test_marks_keep_their_promise(
    start: int, more: int, every: int, messages: list[int], branches: list[int]
) -> None:
    """Ascending, inside, few; and no gap is wider than the spacing promises at ratio 1."""
    end = start + more
    marks = plan_marks(start, end, every, messages, branches)
    assert list(marks) == sorted(set(marks))
    assert all(start < p < end for p in marks)
    assert set(branches) & set(range(start + 1, end)) <= set(marks)
    for a, b in zip((start, *marks), marks, strict=False):
        assert b - a <= every + max(every, end - a)


@pytest.mark.parametrize("n", [1_000, 10_000, 100_000])
def test_a_long_prompt_needs_few(n: int) -> None:
    assert len(plan_marks(0, n, 256, range(100, n, 100), [])) <= MARKS_MAX + 3
