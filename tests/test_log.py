"""The log: readable lines, JSON lines, and nothing that users said."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from towerd import log
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.model.llama_log import route_log


def logger(name: str) -> logging.Logger:
    return logging.getLogger(f"{log.ROOT}.{name}")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream to log to; the logger is restored afterwards."""
    root = logging.getLogger(log.ROOT)
    before = root.handlers, root.level, root.propagate
    yield io.StringIO()
    root.handlers, root.level, root.propagate = before


def test_text_lines_are_short(stream: io.StringIO) -> None:
    log.configure("info", "text", stream)
    logger("engine").info("loaded %s", "it", extra={"n_ctx": 512, "took_s": 1.23456, "x": "a b"})
    logger("engine").debug("not this")
    line = stream.getvalue()
    assert line.endswith('info    engine: loaded it  n_ctx=512 took_s=1.235 x="a b"\n')
    assert line.count("\n") == 1


def test_json_lines_carry_fields(stream: io.StringIO) -> None:
    log.configure("debug", "json", stream)
    logger("store").warning("two\nlines", extra={"path": "p", "level": "spoofed"})
    line = stream.getvalue()
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry["level"] == "warning"
    assert entry["logger"] == "towerd.store"
    assert entry["message"] == "two\nlines"
    assert entry["path"] == "p"
    assert entry["time"].endswith("Z")


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_users_say_and_keys_are_masked(stream: io.StringIO, format: str) -> None:
    log.configure("info", format, stream)
    logger("api").info("request", extra={"prompt": "my secret", "api_key": "k1", "n": 3})
    assert "my secret" not in stream.getvalue()
    assert "k1" not in stream.getvalue()
    assert log.MASK in stream.getvalue()


@pytest.mark.parametrize("format", ["text", "json"])
def test_tracebacks_are_kept(stream: io.StringIO, format: str) -> None:
    log.configure("info", format, stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logger("store").exception("failed")
    assert "ValueError: broken" in stream.getvalue()


@pytest.mark.parametrize("format", ["text", "json"])
def test_no_text_becomes_a_line_or_a_command(stream: io.StringIO, format: str) -> None:
    """What strangers send is neither another line of the log nor obeyed by a terminal."""
    forged = "a\n12:00:00 info    request: b\r\x1b[2J\x9b2J\u202e\u2028\ud800é"
    log.configure("info", format, stream)
    try:
        raise ValueError(forged)
    except ValueError:
        logger("api").exception("POST %s", forged, extra={"error": forged, "path": "\x1b[2J"})
    first, *trace = stream.getvalue().removesuffix("\n").split("\n")
    assert all(line.startswith("    ") and line.isprintable() for line in trace)
    assert first.isprintable()
    assert "é" in first
    if format == "json":
        entry = json.loads(first)
        assert (entry["message"], entry["error"]) == (f"POST {forged}", forged)
        assert not trace


def test_configuring_again_replaces(stream: io.StringIO) -> None:
    log.configure("info", "text", io.StringIO())
    log.configure("info", "text", stream)
    logger("x").info("once")
    assert stream.getvalue().count("once") == 1


def test_reading_the_codecs_files_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its table is a GGUF of integers, which llama.cpp does not know as weights."""
    route_log()
    with caplog.at_level(logging.DEBUG, "towerd.llama"):
        for path in sorted(file.PATH.parent.glob("*.gguf")):
            GgufVocabulary(path).close()
    assert "unknown type i32" in caplog.text
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
