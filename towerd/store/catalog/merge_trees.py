"""The migration that hangs conversations on the tokenizer: one prefix tree for all fingerprints of it.

Before, each fingerprint had a tree of its own. Trees of the same tokenizer are merged, the one that
was opened last first: where two agree, segments are split so that every end of either exists, and
a segment may then have rows of several fingerprints. No token, turn, pin or file is lost.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field

from towerd.store.catalog.identity import TokenizerIdentity, pieces_of
from towerd.store.prefix.keys import key_hash
from towerd.store.prefix.node import PUBLIC
from towerd.store.prefix.scope import is_public, public_of
from towerd.tokens import ID_BYTES, common_prefix, ids_array

_NAME_CHARS_MAX = 190
_REFERENCES = (
    ("turns", "prompt_node"),
    ("turns", "reply_node"),
    ("cold", "base"),
    ("invocations", "tip"),
)


def merge_trees(db: sqlite3.Connection) -> None:
    """Fill the new tables from those of schema 7, inside a transaction."""
    for pieces, group in _groups(db).items():
        identity = TokenizerIdentity(pieces)
        tokenizer = db.execute(
            "INSERT INTO tokenizers(digest, pieces, rules, created, opened) VALUES (?, ?, ?, ?, ?)",
            (identity.digest(), pieces, None, min(g[1] for g in group), max(g[2] for g in group)),
        ).lastrowid
        assert tokenizer is not None
        merged = MergedTree(_last_id(db))
        for pk, _, _ in group:
            db.execute("UPDATE fingerprints SET tokenizer = ? WHERE id = ?", (tokenizer, pk))
            merged.add(pk, _old_tree(db, pk))
        _write(db, tokenizer, identity.digest(), merged)
        _move_references(db, merged.ends)
        for pk, _, _ in group:
            _move_sessions(db, tokenizer, pk)
            _move_bases(db, tokenizer, pk, merged.ends)
    db.execute("DELETE FROM files WHERE id NOT IN (SELECT file FROM views)")


def _groups(db: sqlite3.Connection) -> dict[str, list[tuple[int, float, float]]]:
    """(fingerprint, created, opened) of each fingerprint by its tokenizer, last opened first."""
    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for pk, text, created, opened in db.execute(
        "SELECT id, json, created, opened FROM fingerprints ORDER BY opened DESC, id DESC"
    ).fetchall():
        known = json.loads(text)
        found[pieces_of(known["tokenizer"], known["model_hash"])].append((pk, created, opened))
    return found


@dataclass(slots=True, eq=False)
class OldSegment:
    """A segment of schema 7 and its place in the tree of its fingerprint."""

    id: int
    parent: OldSegment | None
    scope: str
    p0: int
    p1: int
    last_used: float
    hits: int
    created: float
    ids: bytes
    file: int | None
    row0: int
    is_tip: bool = True
    """No segment of its scope continues it."""

    def path(self) -> list[OldSegment]:
        """From the first below the root down to this one."""
        found: list[OldSegment] = []
        at: OldSegment | None = self
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of the merged tree; `views`: (file, first row), one for each fingerprint."""

    id: int
    parent: Segment | None
    scope: str
    p0: int
    ids: bytes
    last_used: float = 0.0
    hits: int = 0
    created: float = 0.0
    views: dict[int, tuple[int, int]] = field(default_factory=dict)
    children: dict[tuple[str, bytes], Segment] = field(default_factory=dict)

    @property
    def p1(self) -> int:
        """The position after its last token."""
        return self.p0 + len(self.ids) // ID_BYTES

    def path(self) -> list[Segment]:
        """From the first below the root down to this one."""
        found: list[Segment] = []
        at = self
        while at.parent is not None:
            found.append(at)
            at = at.parent
        return found[::-1]


class MergedTree:
    """The tree that the trees of fingerprints are added to. `ends`: by the id of a segment of
    schema 7, the one that ends where it ended."""

    def __init__(self, last_id: int) -> None:
        self.root = Segment(0, None, PUBLIC, 0, b"")
        self.ends: dict[int, Segment] = {}
        self.last_id = last_id
        self._taken: set[int] = set()

    def add(self, fingerprint: int, old: list[OldSegment]) -> None:
        """Add a tree, whose parents come before their children."""
        tips = [each for each in old if each.is_tip]
        for tip in sorted(tips, key=lambda each: not is_public(each.scope)):
            path = tip.path()
            data = b"".join(each.ids for each in path)
            ends = {each.p1: each.id if each.scope == tip.scope else 0 for each in path}
            merged = self._grow(data, tip.scope, ends).path()
            at = {segment.p1: segment for segment in merged}
            for each in path:
                if each.scope == tip.scope:
                    end = self.ends.setdefault(each.id, at[each.p1])
                    end.last_used = max(end.last_used, each.last_used)
                    end.hits = max(end.hits, each.hits)
                    end.created = end.created or each.created
            _share_rows(fingerprint, path, merged)

    def _grow(self, ids: bytes, scope: str, ends: dict[int, int]) -> Segment:
        """Have a path for `ids` with a segment that ends at each of `ends`, whose values are the
        ids that new segments of `scope` keep, or 0; returns its last one."""
        path, n = self._longest(ids, scope)
        at = self.root
        cuts = iter([*sorted({*ends, n}), math.inf])
        cut = next(cuts)
        for segment in path:
            while cut < segment.p1:
                if cut > segment.p0:
                    upper = self._split(segment, int(cut) - segment.p0)
                    at = upper if cut == n else at
                cut = next(cuts)
            at = segment if segment.p1 == n else at
        for end in sorted(end for end in ends if end > n):
            piece = ids[at.p1 * ID_BYTES : end * ID_BYTES]
            segment = Segment(self._unused(ends[end]), at, scope, at.p1, piece)
            at.children[scope, piece[:ID_BYTES]] = segment
            at = segment
        return at

    def _longest(self, ids: bytes, scope: str) -> tuple[list[Segment], int]:
        """The path that agrees with most of `ids`, and with how many: that of the scope, which may
        leave the public one anywhere, or else the public one."""
        public, n = _walk(self.root, ids, public_of(scope))
        best = public, n
        if scope != public_of(scope):
            chains = [
                _walk(at, ids, scope)
                for at in reversed([self.root, *(each for each in public.path() if each.p1 <= n)])
            ]
            best = max([*chains, best], key=lambda chain: chain[1])
        return best[0].path(), best[1]

    def _split(self, lower: Segment, n: int) -> Segment:
        """Cut off the first `n` tokens of a segment, which keeps its id and its end."""
        assert lower.parent is not None
        head, tail = lower.ids[: n * ID_BYTES], lower.ids[n * ID_BYTES :]
        upper = Segment(self._unused(0), lower.parent, lower.scope, lower.p0, head)
        upper.last_used, upper.hits, upper.created = lower.last_used, lower.hits, lower.created
        upper.views = dict(lower.views)
        lower.parent.children[lower.scope, head[:ID_BYTES]] = upper
        lower.parent, lower.p0, lower.ids = upper, lower.p0 + n, tail
        lower.views = {of: (file, row0 + n) for of, (file, row0) in lower.views.items()}
        upper.children[lower.scope, tail[:ID_BYTES]] = lower
        return upper

    def _unused(self, id: int) -> int:
        """`id` for a segment that keeps it, or a new one."""
        if id and id not in self._taken:
            self._taken.add(id)
            return id
        self.last_id += 1
        return self.last_id


def _walk(at: Segment, ids: bytes, scope: str) -> tuple[Segment, int]:
    """Follow the children of a scope; the last segment met and the position reached."""
    n = at.p1
    while True:
        child = at.children.get((scope, ids[n * ID_BYTES : (n + 1) * ID_BYTES]))
        if child is None:
            return at, n
        at = child
        rest = ids[n * ID_BYTES : child.p1 * ID_BYTES]
        n += common_prefix(ids_array(child.ids), ids_array(rest))
        if n < child.p1:
            return at, n


def _share_rows(fingerprint: int, old: list[OldSegment], merged: list[Segment]) -> None:
    """Give the segments of a path the rows that the old path with the same tokens had. Each lies
    within one of the old ones."""
    sources = iter(old)
    source = next(sources)
    for segment in merged:
        while source.p1 < segment.p1:
            source = next(sources)
        if source.file is not None:
            view = source.file, source.row0 + segment.p0 - source.p0
            segment.views.setdefault(fingerprint, view)


def _last_id(db: sqlite3.Connection) -> int:
    """The highest id that any segment ever had."""
    names = ("segments", "new_segments")
    rows = db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name IN (?, ?)", names)
    return int(rows.fetchone()[0] or 0)


def _old_tree(db: sqlite3.Connection, fingerprint: int) -> list[OldSegment]:
    """The segments of a fingerprint, parents before their children."""
    found: dict[int, OldSegment] = {}
    for id, parent, *rest in db.execute(
        "SELECT id, parent, scope, p0, p1, last_used, hits, created, ids, file, file_row0"
        " FROM segments WHERE fingerprint = ? ORDER BY p0, id",
        (fingerprint,),
    ).fetchall():
        above = None if parent is None else found[parent]
        found[id] = each = OldSegment(id, above, *rest)
        if above is not None and above.scope == each.scope:
            above.is_tip = False
    return list(found.values())


def _write(db: sqlite3.Connection, tokenizer: int, digest: bytes, tree: MergedTree) -> None:
    """Enter the tree's segments and views, each segment under the key of its prefix."""
    stack: list[tuple[Segment, dict[str, hashlib.blake2b]]] = [(tree.root, {})]
    while stack:
        segment, hashes = stack.pop()
        for child in segment.children.values():
            before = hashes.get(child.scope) or _hash_of(digest, child.scope, segment)
            h = before.copy()
            h.update(child.ids)
            db.execute(
                "INSERT INTO new_segments(id, tokenizer, parent, scope, p0, p1, last_used, hits,"
                " created, key, ids) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    child.id,
                    tokenizer,
                    segment.id or None,
                    child.scope,
                    child.p0,
                    child.p1,
                    child.last_used,
                    child.hits,
                    child.created,
                    h.digest(),
                    child.ids,
                ),
            )
            db.executemany(
                "INSERT INTO views(node, file, row0) VALUES (?, ?, ?)",
                [(child.id, file, row0) for file, row0 in child.views.values()],
            )
            stack.append((child, {child.scope: h}))
    db.execute("DELETE FROM sqlite_sequence WHERE name = 'new_segments'")
    db.execute("INSERT INTO sqlite_sequence VALUES ('new_segments', ?)", (tree.last_id,))


def _hash_of(digest: bytes, scope: str, end: Segment) -> hashlib.blake2b:
    """The hash of a prefix for segments of another scope than its own."""
    parts = []
    at: Segment | None = end
    while at is not None:
        parts.append(at.ids)
        at = at.parent
    h = key_hash(digest, scope)
    h.update(b"".join(reversed(parts)))
    return h


def _move_references(db: sqlite3.Connection, ends: dict[int, Segment]) -> None:
    """Point what refers to a segment to the one that now ends where it ended."""
    moved = [(end.id, id) for id, end in ends.items() if end.id != id]
    if not moved:
        return
    db.execute("CREATE TEMP TABLE moved (id INTEGER PRIMARY KEY, now INTEGER NOT NULL)")
    db.executemany("INSERT INTO moved(now, id) VALUES (?, ?)", moved)
    for table, column in _REFERENCES:
        db.execute(
            f"UPDATE {table} SET {column} = (SELECT now FROM moved WHERE id = {column})"
            f" WHERE {column} IN (SELECT id FROM moved)"
        )
    db.execute(
        "INSERT OR IGNORE INTO pins(node, created) SELECT now, created FROM pins JOIN moved"
        " ON node = id"
    )
    db.execute("DELETE FROM pins WHERE node IN (SELECT id FROM moved)")
    db.execute("DROP TABLE moved")


def _move_sessions(db: sqlite3.Connection, tokenizer: int, fingerprint: int) -> None:
    """Move sessions and workflows. Where two fingerprints have a session of the same name, the
    one that was opened last keeps it, and the other's gets a number behind it."""
    columns = "scope, id, named, title, leaf, n_tokens, created, updated, cold_bytes"
    for pk, scope, id, *rest in db.execute(
        f"SELECT pk, {columns} FROM sessions WHERE fingerprint = ? ORDER BY pk", (fingerprint,)
    ).fetchall():
        name = _free_name(db, tokenizer, scope, id)
        db.execute(
            f"INSERT INTO new_sessions(pk, tokenizer, {columns})"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (pk, tokenizer, scope, name, *rest),
        )
        if name != id:
            db.execute(
                "UPDATE invocations SET session = ? WHERE session = ? AND workflow IN"
                " (SELECT pk FROM workflows WHERE fingerprint = ? AND scope = ?)",
                (name, id, fingerprint, scope),
            )
    db.execute(
        "INSERT INTO new_workflows(pk, tokenizer, scope, id, named, started, ended)"
        " SELECT pk, ?, scope, id, named, started, ended FROM workflows WHERE fingerprint = ?",
        (tokenizer, fingerprint),
    )


def _free_name(db: sqlite3.Connection, tokenizer: int, scope: str, id: str) -> str:
    name, number = id, 1
    taken = "SELECT 1 FROM new_sessions WHERE tokenizer = ? AND scope = ? AND id = ?"
    while db.execute(taken, (tokenizer, scope, name)).fetchall():
        number += 1
        name = f"{id[:_NAME_CHARS_MAX]} ({number})"
    return name


def _move_bases(
    db: sqlite3.Connection, tokenizer: int, fingerprint: int, ends: dict[int, Segment]
) -> None:
    """Move bases; of two with one name, that of the fingerprint that was opened last stays."""
    columns = "scope, name, level, n_tokens, digest, created, format, module"
    ((owner,),) = db.execute("SELECT digest FROM fingerprints WHERE id = ?", (fingerprint,))
    for id, node, *rest, module in db.execute(
        f"SELECT id, node, {columns} FROM bases WHERE fingerprint = ?", (fingerprint,)
    ).fetchall():
        db.execute(
            f"INSERT OR IGNORE INTO new_bases(id, tokenizer, node, {columns})"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (id, tokenizer, ends[node].id, *rest, module and _measured_by(owner, module)),
        )


def _measured_by(fingerprint: bytes, module: str) -> str:
    """A module that says for which rows its drift was measured."""
    return json.dumps(json.loads(module) | {"fingerprint": fingerprint.hex()})
