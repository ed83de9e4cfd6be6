"""A stream of events that breaks off in one: what is told then is an event of its own."""

from __future__ import annotations

import pytest

from towerd.api.relay.relay import LINE_BYTES_MAX, LineEnds


@pytest.mark.parametrize(
    ("chunks", "passed", "held", "is_within"),
    [
        ([b'data: {"a": 1}\n\n'], b'data: {"a": 1}\n\n', b"", False),
        ([b'data: {"a": 1}\n\nda', b'ta: {"b'], b'data: {"a": 1}\n\n', b'data: {"b', False),
        ([b"event: error\n", b"data: {"], b"event: error\n", b"data: {", True),
        ([b"data: 1\r\n\r", b"\n"], b"data: 1\r\n\r\n", b"", False),
        ([b"", b"x" * LINE_BYTES_MAX, b"y"], b"x" * LINE_BYTES_MAX + b"y", b"", True),
    ],
    ids=["whole", "begun", "between", "carriage", "too long"],
)
def test_line_ends(chunks: list[bytes], passed: bytes, held: bytes, is_within: bool) -> None:
    ends = LineEnds()
    assert b"".join(map(ends.feed, chunks)) == passed
    assert ends.is_within_event == is_within
    assert ends.rest() == held
