"""llama.cpp's log in ours."""

from __future__ import annotations

import logging
from pathlib import Path

from towerd import codec
from towerd.codec.vocabulary import GgufVocabulary
from towerd.engine.embedded.model.model import init_backend


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_the_codecs_own_files_are_read_without_warnings() -> None:
    init_backend()
    logger, kept = logging.getLogger("towerd.llama"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    try:
        for path in sorted((Path(codec.__file__).parent / "data").glob("*.gguf")):
            GgufVocabulary(path).close()
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    assert any("unknown type i32" in each.getMessage() for each in kept.records)
    assert [each.getMessage() for each in kept.records if each.levelno > logging.INFO] == []
