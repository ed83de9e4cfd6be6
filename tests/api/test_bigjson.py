"""Bodies of any shape are decoded as json does it, and short strings are not looked at one by one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from towerd.api import bigjson
from towerd.errors import InvalidRequest

SIZES = (0, 1, 30, 31, 32, 33, 990, 1000, 1001, 2030, 2047, 2048, 2049, 2050, 5000)
"""Around everything that is counted."""
TEXTS = st.builds(
    lambda unit, n, end: (unit * (n // len(unit) + 1))[:n] + end,
    st.sampled_from(("x", '"', "\\", "a\n", "é", "ab[1, 2]", "\\\\n", "{]}[")),
    st.sampled_from(SIZES),
    st.sampled_from(("", '"', "\\", "\\\\", "é")),
)
LEAVES = TEXTS | st.integers(-9, 9) | st.none() | st.just([7] * 1500) | st.just([1.5] * 900)
VALUES = st.recursive(
    LEAVES, lambda each: st.lists(each, max_size=4) | st.dictionaries(TEXTS, each, max_size=4)
)


def plain(value: Any) -> Any:
    """With lists for arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


@settings(max_examples=300, deadline=None)
@given(value=VALUES, padding=st.sampled_from(SIZES), ascii_only=st.booleans())
def test_as_json_has_it(value: Any, padding: int, ascii_only: bool) -> None:
    """Whatever is lifted out comes back to its place, keys included."""
    body = {"a": value, "b": [" " * padding, value, {"role": "user"}]}
    text = json.dumps(body, ensure_ascii=ascii_only)
    assert plain(bigjson.decode(text.encode())) == body


@settings(max_examples=200, deadline=None)
@given(value=VALUES, cut=st.floats(0, 1, exclude_max=True))
@example(value=[], cut=1 - 2**-53)
def test_cut_off_bodies_are_refused(value: Any, cut: float) -> None:
    """At least the last bracket is missing."""
    data = json.dumps([value, "x" * 3000]).encode()
    with pytest.raises(InvalidRequest):
        bigjson.decode(data[: int(cut * len(data))] or b"[")


def test_a_long_chat_of_short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is long is looked at by Python: nothing of it, or one message."""
    looked_at = 0
    end_of = bigjson._string_end

    def watched(data: bytes, start: int) -> int:
        nonlocal looked_at
        looked_at += 1
        return end_of(data, start)

    monkeypatch.setattr(bigjson, "_string_end", watched)
    messages = [{"role": "user", "content": 'He said: "Go\\on".\n'}] * 5000
    for body, n_max in (
        ({"messages": messages}, 0),
        ({"messages": [{"role": "system", "content": "Be kind.\n" * 900}, *messages]}, 1),
    ):
        looked_at = 0
        assert bigjson.decode(json.dumps(body).encode()) == body
        assert looked_at <= n_max
