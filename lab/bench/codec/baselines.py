"""General-purpose compressors, each set up as well as it can be for short texts of chat."""

from __future__ import annotations

import lzma
from collections.abc import Callable

import click
import zstandard

ZSTD_DICTIONARY_BYTES = 112 * 1024
PPMD_ORDER, PPMD_MEMORY_BYTES = 12, 256 << 20
PRIME_BYTES = 1_000_000
Size = Callable[[bytes], int]


def baselines(training: list[bytes]) -> dict[str, Size]:
    """Name -> function that gives the compressed bytes of a text. `training`: similar texts, for
    dictionaries and priming.

    ClickException if a compressor is not installed."""
    try:
        import brotli
        import pyppmd
    except ImportError as error:
        raise click.ClickException(
            f"{error.name} is not installed: pip install -e '.[bench]' installs the baselines."
        ) from error
    plain = zstandard.ZstdCompressor(level=19)
    parts: list[bytes | bytearray | memoryview[int]] = [
        text[at : at + 4096] for text in training for at in range(0, len(text), 4096)
    ]
    dictionary = zstandard.train_dictionary(ZSTD_DICTIONARY_BYTES, parts, level=19)
    trained = zstandard.ZstdCompressor(level=19, dict_data=dictionary)
    prime = b"".join(training)[:PRIME_BYTES]

    def ppmd(text: bytes) -> int:
        encoder = pyppmd.Ppmd7Encoder(PPMD_ORDER, PPMD_MEMORY_BYTES)
        return len(encoder.encode(text) + encoder.flush())

    primed = ppmd(prime)
    return {
        "zstd": lambda text: len(plain.compress(text)),
        "zstd_dict": lambda text: len(trained.compress(text)),
        "xz": lambda text: len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
        "brotli": lambda text: len(brotli.compress(text, quality=11)),
        "ppmd": ppmd,
        "ppmd_primed": lambda text: ppmd(prime + text) - primed,
    }
