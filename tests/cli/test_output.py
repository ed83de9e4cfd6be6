"""Output is free of terminal control characters, and shows sizes and ages."""

from __future__ import annotations

import time

import pytest

from towerd.cli import output
from towerd.cli.output import ago, clean, preview, short_ids, show_table, size
from towerd.cli.progress import duration


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (3600, "1 h"), (200000, "2 d")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_has_a_line_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However narrow the terminal is: numbers are whole, texts are cut, empty columns left out."""
    monkeypatch.setattr(output, "PIPE_WIDTH", 100)
    rows = [("a" * 30, "", f"{n:,}", "title " * 40) for n in (1, 123456789)]
    show_table(("NAME", "TENANT", ">TOKENS", "TITLE"), rows)
    lines = capsys.readouterr().out.rstrip().splitlines()
    table = [line for line in lines if line.strip() and "─" not in line]
    assert len(table) == 3
    assert all(len(line) <= 100 for line in lines)
    assert table[0].split() == ["NAME", "TOKENS", "TITLE"]
    assert "123,456,789" in table[2]
    assert table[2].rstrip().endswith("…")


def test_short_ids() -> None:
    """Eight characters, more where two begin alike; names of clients as they are."""
    ids = ["0123456789abcdef", "0123456789abxxxx", "0123456789ab0000", "0123456789abcd00", "f" * 16]
    assert short_ids(ids) == {
        ids[0]: "0123456789abcde",
        ids[1]: ids[1],
        ids[2]: "0123456789ab0",
        ids[3]: "0123456789abcd0",
        ids[4]: "f" * 8,
    }


def test_ago_of_the_future_is_now() -> None:
    assert ago(time.time() + 100) == "0 s ago"
