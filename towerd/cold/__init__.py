"""The cold tier: sessions as coded text, frozen in idle time and thawed on demand."""

from __future__ import annotations

from towerd.cold.coding import Coding, Source, source_of
from towerd.cold.freezing import Froze, cold_history, decode, freeze, thaw
from towerd.cold.keeper import Keeper

__all__ = [
    "Coding",
    "Froze",
    "Keeper",
    "Source",
    "cold_history",
    "decode",
    "freeze",
    "source_of",
    "thaw",
]
