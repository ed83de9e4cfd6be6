"""Records of made-up sessions and bases, of which only the size counts."""

from __future__ import annotations

from towerd.store.sessions.branches import DIGEST_BYTES
from towerd.tiers.shared.objects import VERSION, BaseRecord, RowsPlace, SessionRecord
from towerd.tokens import ID_BYTES

TOWER_TOKEN_BYTES = 1
"""Of the `.tower` file in the record of a session, for each token: assumed."""
_MODEL = bytes(32)


def session_record(
    n_tokens: int,
    turns: int,
    rows: list[RowsPlace],
    others: list[RowsPlace],
    contains: list[str],
) -> SessionRecord:
    """The record of a session of so many tokens and turns. others: rows that its path no longer has; contains: the
    texts of its earlier records"""
    return SessionRecord(
        version=VERSION,
        row_identity=_MODEL,
        adapters="",
        rows=rows,
        transform_bases=[],
        tower=bytes(TOWER_TOKEN_BYTES * n_tokens),
        turns=[bytes(DIGEST_BYTES)] * turns,
        contains=contains,
        others=others,
    )


def base_record(n_tokens: int, rows: list[RowsPlace]) -> BaseRecord:
    """The record of a base of so many tokens."""
    return BaseRecord(
        version=VERSION,
        row_identity=_MODEL,
        adapters="",
        rows=rows,
        transform_bases=[],
        name="base",
        level=0,
        tokenizer=_MODEL,
        ids=bytes(ID_BYTES * n_tokens),
        format=None,
        reuse="",
    )
