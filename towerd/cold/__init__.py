"""The cold tier: sessions as coded text, frozen in idle time and thawed on demand."""

from __future__ import annotations

from towerd.cold.coding import Coding, VocabularySource, check_codec_model, vocabulary_source
from towerd.cold.cold_tier import ColdTier
from towerd.cold.freezing import (
    FreezeResult,
    cold_history,
    decode,
    freeze,
    recode,
    thaw,
    write_copy,
)
from towerd.cold.idle_freezer import IdleFreezer

__all__ = [
    "Coding",
    "FreezeResult",
    "ColdTier",
    "IdleFreezer",
    "VocabularySource",
    "check_codec_model",
    "cold_history",
    "decode",
    "freeze",
    "recode",
    "vocabulary_source",
    "thaw",
    "write_copy",
]
