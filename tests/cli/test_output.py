"""Output is free of terminal control characters, and shows sizes and ages."""

from __future__ import annotations

import time

import pytest

from towerd.cli.output import ago, clean, preview, size


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain text", "plain text"),
        ("\x1b[2Jgone", " [2Jgone"),
        ("a\x9b31mb", "a 31mb"),
        ("left\u202eright", "left right"),
        ("two\nlines\r", "two lines "),
        ("日本語 🙂", "日本語 🙂"),
    ],
)
def test_clean_takes_what_terminals_obey(raw: str, shown: str) -> None:
    assert clean(raw) == shown


def test_clean_can_keep_line_ends() -> None:
    assert clean("a\n\x1bb\n", lines=True) == "a\n b\n"


def test_preview_is_one_line_of_limited_length() -> None:
    assert preview("short\n text", 20) == "short text"
    assert preview("word " * 100, 12) == "word word wo…"
    assert preview("word " * 100 + "end", 8, end=True) == "…word end"
    assert preview("", 5) == ""


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (200 * 2**20, "200 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_size(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s ago"), (90, "2 min ago"), (7200, "2 h ago"), (864000, "10 d ago")],
)
def test_ago(seconds: int, text: str) -> None:
    assert ago(time.time() - seconds) == text


def test_ago_of_the_future_is_now() -> None:
    assert ago(time.time() + 100) == "0 s ago"
