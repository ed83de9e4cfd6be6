"""Logging: one short line for people, or one JSON object per line for programs.

Modules log through `logging.getLogger(__name__)`; fields are passed beside the message
(`log.info("resumed", extra={"tokens": 512})`). Users' text and secrets are never logged: fields
with such names are masked here, so that a mistake elsewhere does not reach a disk.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

ROOT = "towerd"
SECRET = frozenset(
    ("prompt", "content", "messages", "text", "body", "input", "key", "api_key", "authorization")
)
MASK = "(hidden)"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(
    level: str = "info",
    format: Literal["text", "json"] | str = "text",
    stream: TextIO | None = None,
    fields: Mapping[str, Any] | None = None,
    path: Path | None = None,
) -> None:
    """Send towerd's log to `stream` (default: stderr), and append it to the file at `path`, replacing
    an earlier configuration. fields: beside every message that has no such fields. Raises OSError:
    the file cannot be opened."""
    handlers: list[logging.Handler] = [
        logging.StreamHandler(sys.stderr if stream is None else stream)
    ]
    if path is not None:
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    for handler in handlers:
        for name, value in (fields or {}).items():
            handler.addFilter(partial(_add, name, value))
        handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger = logging.getLogger(ROOT)
    for old in logger.handlers:
        if isinstance(old, logging.FileHandler):
            old.close()
    logger.handlers = handlers
    logger.setLevel(level.upper())
    logger.propagate = False


def _add(name: str, value: Any, record: logging.LogRecord) -> bool:
    if not hasattr(record, name):
        setattr(record, name, value)
    return True


class TextFormatter(logging.Formatter):
    """`12:03:04 info  engine: model loaded  n_ctx=4096 path=...`"""

    def format(self, record: logging.LogRecord) -> str:
        """The line, followed by the indented lines of a traceback if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix(ROOT + ".")
        line = f"{clock} {record.levelname.lower():<7} {name}: {record.getMessage()}"
        pairs = " ".join(f"{key}={_plain(value)}" for key, value in _fields(record).items())
        if pairs:
            line += "  " + pairs
        lines = [line, *_traceback(self, record).splitlines()]
        return "\n    ".join(map(_shown, lines))  # indented: an error's text is no line of its own


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., <fields>}`"""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object without line breaks; fields cannot replace the four standard keys."""
        instant = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = _fields(record) | {
            "time": f"{instant}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        trace = _traceback(self, record)
        if trace:
            entry["traceback"] = trace
        return _shown(json.dumps(entry, default=str, ensure_ascii=False))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        key: MASK if key in SECRET else value
        for key, value in vars(record).items()
        if key not in _STANDARD
    }


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or "\n" in text else text


def _shown(text: str) -> str:
    """Text on one line that no terminal obeys: what cannot be printed is escaped as in JSON."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""
