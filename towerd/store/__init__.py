"""The store: segments, their prefix tree, sessions, and the files that hold the rows."""

from towerd.store.catalog.catalog import Catalog, latest_row_identity
from towerd.store.maintenance.verify import VerifyReport
from towerd.store.rows.collect import GcReport
from towerd.store.rows.format_request import FormatRequest
from towerd.store.rows.rows_part import RowsPart, Tier
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_header import FormatRun
from towerd.store.sessions.history import History
from towerd.store.sessions.turn import Base, SessionInfo, Turn, TurnInfo, TurnResult
from towerd.store.store import Store
from towerd.store.tree.handle import Handle
from towerd.store.tree.node import PUBLIC, Node
from towerd.store.tree.tree import Match

__all__ = [
    "PUBLIC", "Base", "Catalog",
    "GcReport", "Handle", "History", "Match", "Node", "RowsPart", "FormatRun", "SegmentFile", "SessionInfo",
    "Store", "Tier", "Turn", "TurnInfo", "TurnResult", "VerifyReport", "FormatRequest",
    "latest_row_identity",
]  # fmt: skip
