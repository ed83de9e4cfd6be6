"""The store: segments, the trie over them, sessions, and the files their rows are kept in."""

from towerd.store.catalog import Catalog, latest_fingerprint
from towerd.store.collect import GcReport
from towerd.store.history import History
from towerd.store.module import Module
from towerd.store.node import PUBLIC, Ids, Node
from towerd.store.reencode import Wish
from towerd.store.rows import RowsPart, Tier
from towerd.store.run import (
    AFTER_SPLICE,
    APPROXIMATE,
    DERIVED,
    EXACT,
    SPLICED,
    THINNED,
    Run,
    Taint,
    computed_after,
)
from towerd.store.segment_file import SegmentFile
from towerd.store.store import Store
from towerd.store.trie import Match
from towerd.store.turn import Base, SessionInfo, Turn, TurnInfo, TurnResult
from towerd.store.verify import VerifyReport

__all__ = [
    "AFTER_SPLICE", "APPROXIMATE", "DERIVED", "EXACT", "PUBLIC", "SPLICED", "THINNED", "Base", "Catalog",
    "GcReport", "History", "Ids", "Match", "Module", "Node", "RowsPart", "Run", "SegmentFile", "SessionInfo",
    "Store", "Taint", "Tier", "Turn", "TurnInfo", "TurnResult", "VerifyReport", "Wish",
    "computed_after", "latest_fingerprint",
]  # fmt: skip
