"""Integers between bounds, as a grammar: every integer inside and none outside."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towerd.engine.embedded.grammar import schema_to_gbnf
from towerd.engine.embedded.int_range import DIGITS_MAX, int_range_gbnf
from towerd.errors import InvalidRequest

INTEGERS = st.integers(-(10**6), 10**6) | st.integers(-(10**17), 10**17)


def matches(expression: str, text: str) -> bool:
    """The expressions use only what regular expressions write alike, but for blanks and quotes."""
    return re.fullmatch(expression.replace(" ", "").replace('"', ""), text) is not None


@given(st.integers(-130, 130) | st.none(), st.integers(-130, 130) | st.none())
def test_small_bounds(low: int | None, high: int | None) -> None:
    """Compared with every integer around them."""
    if low is not None and high is not None and low > high:
        with pytest.raises(ValueError, match="no integer"):
            int_range_gbnf(low, high)
        return
    expression = int_range_gbnf(low, high)
    for value in range(-1200, 1200):
        inside = (low is None or low <= value) and (high is None or value <= high)
        assert matches(expression, str(value)) == inside, value
    for text in ("", "-", "-0", "00", "01", "-01", "1.0", "+1", "1e3"):
        assert not matches(expression, text)


@given(INTEGERS, INTEGERS, INTEGERS)
@example(0, 10**17, 10**16)
def test_large_bounds(a: int, b: int, value: int) -> None:
    """Any integer against any bounds, and the bounds themselves with their neighbours."""
    low, high = sorted((a, b))
    expression = int_range_gbnf(low, high)
    for each in (value, low - 1, low, low + 1, high - 1, high, high + 1):
        assert matches(expression, str(each)) == (low <= each <= high)


def test_no_bound_is_not_for_ever() -> None:
    """Without a bound an integer may have so many digits and no more, or the bound's."""
    assert matches(int_range_gbnf(5, None), "9" * DIGITS_MAX)
    assert not matches(int_range_gbnf(5, None), "1" + "0" * DIGITS_MAX)
    assert matches(int_range_gbnf(None, -5), "-" + "9" * DIGITS_MAX)
    assert matches(int_range_gbnf(10**20, None), "9" * 21)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 0, "maximum": 99}, (0, 7, 99), (-1, 100)),
        ({"exclusiveMinimum": 0}, (1, 500), (0, -3)),
        ({"exclusiveMaximum": 3.5, "minimum": 2.0}, (2, 3), (1, 4)),
        ({"minimum": 1.5, "exclusiveMinimum": 7}, (8, 90), (2, 7)),
        ({"exclusiveMinimum": True, "minimum": 2}, (3,), (2,)),
    ],
)
def test_schema_bounds(
    bounds: dict[str, float], inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    """Every spelling of a bound, draft 4's boolean ones too, alone and in a property."""
    grammar = schema_to_gbnf({"type": "integer", **bounds})
    (root,) = re.findall(r"^root ::= \((.*)\) space$", grammar, re.MULTILINE)
    assert all(matches(root, str(value)) for value in inside)
    assert not any(matches(root, str(value)) for value in outside)
    nested = {"type": "object", "properties": {"n": {"type": ["integer", "null"], **bounds}}}
    assert root in schema_to_gbnf(nested)


def test_wrong_bounds() -> None:
    """Bounds that are no numbers, or leave nothing."""
    for bounds in ({"minimum": "3"}, {"minimum": 3, "maximum": 2},
                   {"minimum": float("nan")}, {"maximum": 10**30}):  # fmt: skip
        with pytest.raises(InvalidRequest):
            schema_to_gbnf({"type": "integer", **bounds})
