"""The store: segments, the trie over them, sessions, and the files their rows are kept in."""

from towerd.store.catalog import Catalog, latest_fingerprint
from towerd.store.collect import GcReport
from towerd.store.node import PUBLIC, Ids, Node
from towerd.store.rows import RowsPart, Tier
from towerd.store.segment_file import SegmentFile
from towerd.store.store import Store
from towerd.store.trie import Match
from towerd.store.turn import Base, SessionInfo, Turn, TurnInfo, TurnResult
from towerd.store.verify import VerifyReport

__all__ = [
    "PUBLIC", "Base", "Catalog", "GcReport", "Ids", "Match", "Node", "RowsPart", "SegmentFile",
    "SessionInfo", "Store", "Tier", "Turn", "TurnInfo", "TurnResult", "VerifyReport",
    "latest_fingerprint",
]  # fmt: skip
