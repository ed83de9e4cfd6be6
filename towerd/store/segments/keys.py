"""Segment keys: 32-byte identities of segments."""

from __future__ import annotations

import hashlib

KEY_BYTES = 32


def key_hash(identity: bytes, scope: str) -> hashlib.blake2b:
    """A hash that gives the key of [0, p1) once it is fed the ids [0, p1) (int32 LE).

    `identity` is a 32-byte digest: the tokenizer's for what the catalog lists, the fingerprint's
    for files of rows and of states. The scope is length-prefixed, so that no scope and ids
    can pass for others."""
    name = scope.encode()
    h = hashlib.blake2b(identity, digest_size=KEY_BYTES)
    h.update(len(name).to_bytes(4, "little") + name)
    return h


def segment_key(identity: bytes, scope: str, prefix: bytes) -> bytes:
    """BLAKE2b-256(identity, scope, ids[0:p1]); over the whole prefix, so that a split
    changes no key below it."""
    h = key_hash(identity, scope)
    h.update(prefix)
    return h.digest()
