"""The bundled sample of chat, from which dictionaries and ranks are derived.

A blob names the sample that it was written with, so a sample that was ever released stays in the
package. `lab/prior/sample.py` builds it; the licences are in NOTICE.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import zstandard

PATH = Path(__file__).resolve().parent.parent / "data" / "sample.txt.zst"
TEXT_BYTES_MAX = 1 << 20


@functools.cache
def load() -> bytes:
    """The sample: UTF-8 text, with a form feed between records."""
    return zstandard.ZstdDecompressor().decompress(PATH.read_bytes(), TEXT_BYTES_MAX)


@functools.cache
def name() -> bytes:
    """8 bytes that name the sample."""
    return hashlib.blake2b(load(), digest_size=8).digest()
