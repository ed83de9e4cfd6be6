"""Erasing what a deletion leaves where the catalog does not look.

A segment file has the ids of all its tokens in its header, and keeps them while any of its segments
is needed; the quarantine keeps whole catalogs and journals; a vocabulary that is known in part tells
which words were said.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from towerd.errors import StoreError
from towerd.store.catalog.vocabularies import Vocabularies
from towerd.store.files import durable
from towerd.store.rows.collect import GcReport, drop_foreign_file, has_unneeded
from towerd.store.rows.rows import RowStore
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.sessions.deletions import DELETED_META
from towerd.store.sessions.media import MediaTable
from towerd.store.state.state import StoreState
from towerd.store.tree.scope import tenant_of
from towerd.tokens import ids_array

_LONGER = (
    "SELECT files.id, name, bytes, fingerprint FROM files JOIN views ON file = files.id"
    " JOIN segments ON segments.id = views.node"
    " GROUP BY files.id HAVING files.p0 + n_rows > max(p1)"
)
_FORGET_NAMES = (
    "UPDATE invocations SET session = ''"
    " WHERE session != '' AND session NOT IN (SELECT id FROM sessions)"
)
_SAID = (
    "SELECT scope, ids FROM segments WHERE tokenizer = ? UNION ALL"
    " SELECT scope, tail FROM turns JOIN sessions ON pk = session WHERE tokenizer = ?"
)


def erase(
    state: StoreState,
    rows: RowStore,
    vocabularies: Vocabularies,
    media: MediaTable,
    report: GcReport,
) -> GcReport:
    """Erase what a collection has left; returns its report with what was freed here as well. The
    lock is not held while files are written. Raises StoreError."""
    with state.lock:
        was_deleted = state.catalog.get_meta(DELETED_META) is not None
        longer = _longer_files(state, was_deleted)
    for file in longer:
        _cut_file(rows, file, was_deleted)
    with state.lock:
        freed = _erase_copies(state, vocabularies)
    n_media, media_bytes = media.sweep()
    state.catalog.purge()
    rows.replaced.remove_all()
    return replace(
        report,
        files=report.files + n_media,
        bytes_freed=report.bytes_freed + freed + media_bytes,
    )


def _longer_files(state: StoreState, was_deleted: bool) -> list[SegmentFile]:
    """The files with tokens behind those of their last segment. Those of other row identities cannot
    be written here: they are deleted if these may be tokens of a deleted session, and their rows are
    evaluated again. Otherwise they stay. Runs under the lock."""
    found = []
    for id, name, n_bytes, row_identity in state.catalog.rows(_LONGER):
        if row_identity != state.identity.row_identity:
            if was_deleted:
                drop_foreign_file(state, id, name, n_bytes)
        elif id in state.files:
            found.append(state.files[id])
    return found


def _cut_file(rows: RowStore, file: SegmentFile, was_deleted: bool) -> None:
    """Write a file again without the tokens behind its last segment. Without room, its rows go if
    these may be tokens of a deleted session; those of a damaged one go in any case."""
    try:
        rows.reencode(file, ())
    except StoreError:
        if was_deleted:
            rows.drop_file(file)


def _erase_copies(state: StoreState, vocabularies: Vocabularies) -> int:
    """If sessions were deleted since the last time, empty the quarantine, and forget their names and
    words that only they used; returns the bytes freed. Runs under the lock. Raises StoreError."""
    if state.catalog.get_meta(DELETED_META) is None:
        return 0
    freed = state.directory.empty_quarantine()
    with durable.store_errors("what was set aside cannot be deleted"):
        # or a power cut brings it back when nothing says any more that it is to go
        durable.sync_dir(state.directory.quarantine)
    for digest in vocabularies.digests(".words", ".damaged"):
        vocabularies.keep_words(digest, _words_said(state, digest))
    with state.catalog.transaction():
        state.catalog.run(_FORGET_NAMES)
        if not has_unneeded(state.catalog):  # else the next gc finds more of them
            state.catalog.run("DELETE FROM meta WHERE key = ?", (DELETED_META,))
    return freed


def _words_said(state: StoreState, tokenizer: bytes) -> dict[str, set[int]]:
    """Which tokens occur in what each tenant has of a tokenizer."""
    said: defaultdict[str, set[int]] = defaultdict(set)
    of = state.catalog.rows("SELECT id FROM tokenizers WHERE digest = ?", (tokenizer,))
    for row in of:
        for scope, ids in state.catalog.rows(_SAID, row * 2):
            said[tenant_of(scope)].update(ids_array(ids).tolist())
    return said
