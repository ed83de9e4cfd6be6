"""Where state checkpoints are taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.engine.checkpoint_positions import CHECKPOINTS_MAX, plan_checkpoints

NUMBERS = st.integers(min_value=0, max_value=40_000)


def test_a_bare_prompt_is_marked_before_its_last_token() -> None:
    assert plan_checkpoints(0, 100, 512, [], []) == (99,)
    assert plan_checkpoints(99, 100, 512, [], []) == ()
    assert plan_checkpoints(0, 1, 512, [], []) == ()


def test_the_end_of_the_last_message_stands_for_the_end() -> None:
    """Three tokens of the next one's head cost less than another state."""
    assert plan_checkpoints(0, 100, 512, [40, 97], []) == (40, 97)


def test_a_branch_always_has_a_checkpoint() -> None:
    assert plan_checkpoints(0, 1000, 512, [], [301, 302]) == (301, 302, 999)
    assert plan_checkpoints(301, 1000, 256, [], [301]) == (512, 999)


def test_the_past_is_sparse() -> None:
    positions = plan_checkpoints(0, 32_768, 512, [], [])
    gaps = [b - a for a, b in zip(positions, positions[1:], strict=False)]
    assert gaps[-2] == 512
    assert gaps[0] >= 2048
    assert len(positions) <= CHECKPOINTS_MAX


@settings(deadline=None, max_examples=60)
@given(
    start=NUMBERS,
    more=st.integers(2, 40_000),
    every=st.integers(16, 2048),
    messages=st.lists(NUMBERS, max_size=60),
    branches=st.lists(NUMBERS, max_size=3),
)
def test_positions_keep_their_spacing(
    start: int, more: int, every: int, messages: list[int], branches: list[int]
) -> None:
    """Ascending, inside, few; and no gap is wider than the spacing promises at ratio 1."""
    end = start + more
    positions = plan_checkpoints(start, end, every, messages, branches)
    assert list(positions) == sorted(set(positions))
    assert all(start < p < end for p in positions)
    assert set(branches) & set(range(start + 1, end)) <= set(positions)
    for a, b in zip((start, *positions), positions, strict=False):
        assert b - a <= every + max(every, end - a)


@pytest.mark.parametrize("n", [1_000, 10_000, 100_000])
def test_a_long_prompt_needs_few(n: int) -> None:
    assert len(plan_checkpoints(0, n, 256, range(100, n, 100), [])) <= CHECKPOINTS_MAX + 3
