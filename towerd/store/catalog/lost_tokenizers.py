"""Tokenizers whose row is lost in the catalog and in its journal: found again, or kept as unknown.

Every conversation hangs on its tokenizer's row. What names one otherwise are the row identities of its
models and the vocabularies that are kept as files; the key of a segment, a hash over the tokenizer's
digest and the tokens, proves which one it was. One that nothing names keeps its number, and its
conversations stay listed as those of another tokenizer, until its model is served again.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeAlias

import msgspec

from towerd.codec import container
from towerd.slots.errors import StateError
from towerd.slots.row_identity import RowIdentity
from towerd.store.catalog.identity import TokenizerIdentity, pieces_of
from towerd.store.catalog.vocabularies import Vocabularies
from towerd.store.segments.segment_header import segment_key

Candidate: TypeAlias = tuple[bytes, TokenizerIdentity]

UNKNOWN = ""
"""The `pieces` of a row whose tokenizer is not known."""
_LOST = (
    "SELECT DISTINCT tokenizer FROM (SELECT tokenizer FROM sessions UNION SELECT tokenizer FROM"
    " segments UNION SELECT tokenizer FROM bases UNION SELECT tokenizer FROM workflows)"
    " WHERE tokenizer NOT IN (SELECT id FROM tokenizers)"
)
_ROOT = (
    "SELECT scope, ids, key FROM segments"
    " WHERE tokenizer = ? AND parent IS NULL AND p0 = 0 ORDER BY id LIMIT 1"
)
_BLOB = "SELECT blob FROM blobs JOIN sessions ON session = pk WHERE tokenizer = ? LIMIT 1"


def restore(db: sqlite3.Connection, vocabularies: Vocabularies) -> int:
    """Enter the row of every lost tokenizer again, inside a transaction; returns how many are unknown."""
    n_unknown = 0
    for (pk,) in db.execute(_LOST).fetchall():
        found = _identify(db, pk, vocabularies)
        n_unknown += found is None
        placeholder = hashlib.blake2b(f"lost tokenizer {pk}".encode(), digest_size=32).digest()
        digest, identity = found or (placeholder, TokenizerIdentity(UNKNOWN))
        db.execute(
            "INSERT INTO tokenizers(id, digest, pieces, rules, created, opened)"
            " VALUES (?, ?, ?, ?, 0, 0)",
            (pk, digest, identity.pieces, identity.rules),
        )
    return n_unknown


def recognise(db: sqlite3.Connection, wanted: TokenizerIdentity) -> tuple[int, bytes] | None:
    """The row and the digest of an unknown tokenizer whose segments prove that it is this one."""
    for (pk,) in db.execute("SELECT id FROM tokenizers WHERE pieces = ?", (UNKNOWN,)).fetchall():
        for candidate in (wanted, TokenizerIdentity(wanted.pieces)):
            if _proves(db, pk, candidate.digest()):
                return int(pk), candidate.digest()
    return None


def _identify(db: sqlite3.Connection, pk: int, vocabularies: Vocabularies) -> Candidate | None:
    taken = {digest for (digest,) in db.execute("SELECT digest FROM tokenizers")}
    models = [each for each in _of_models(db, pk) if each[0] not in taken]
    kept = [each for each in _of_vocabularies(vocabularies) if each[0] not in taken]
    if db.execute(_ROOT, (pk,)).fetchall():
        return next((each for each in (*models, *kept) if _proves(db, pk, each[0])), None)
    if models:  # all is frozen, and no key tells; the model says which tokens it has
        digests = {digest for digest, _ in kept}
        return next((each for each in models if each[0] in digests), models[0])
    blobs = [blob for (blob,) in db.execute(_BLOB, (pk,))]
    fitting = [
        each
        for each in kept
        if blobs
        and container.claimed_vocabulary(blobs[0])
        in {words.hash for words in vocabularies.of_any(each[0])}
    ]
    return fitting[0] if len(fitting) == 1 else None


def _of_models(db: sqlite3.Connection, pk: int) -> Iterator[Candidate]:
    """What the row identities that refer to a tokenizer say of it, with its rules and without."""
    rows = db.execute("SELECT json FROM fingerprints WHERE tokenizer = ?", (pk,)).fetchall()
    for (text,) in rows:
        with suppress(StateError, msgspec.DecodeError):
            known = RowIdentity.from_json(msgspec.json.decode(text))
            pieces = pieces_of(known.tokenizer, known.model_hash)
            rules = db.execute(
                "SELECT value FROM meta WHERE key = ?", (f"tokenizer_rules:{known.model_hash}",)
            ).fetchall()
            for identity in (
                *(TokenizerIdentity(pieces, each) for (each,) in rules),
                TokenizerIdentity(pieces),
            ):
                yield identity.digest(), identity


def _of_vocabularies(vocabularies: Vocabularies) -> Iterator[Candidate]:
    for digest in vocabularies.digests(".vocab", ".words"):
        for words in vocabularies.of_any(digest)[:1]:
            yield digest, words.tokenizer


def _proves(db: sqlite3.Connection, pk: int, digest: bytes) -> bool:
    """Whether a segment of a tokenizer has the key that it has under this digest."""
    rows = db.execute(_ROOT, (pk,)).fetchall()
    return any(segment_key(digest, scope, ids) == key for scope, ids, key in rows)
