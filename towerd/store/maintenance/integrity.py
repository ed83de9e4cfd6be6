"""Store invariants: prefix tree, catalog, files and sums must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from towerd.store.segments.format_run import decode_runs
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.store.tree.scope import public_of
from towerd.tokens import ID_BYTES

_LOST = (
    "SELECT turns.id, sessions.id FROM turns JOIN sessions ON sessions.pk = turns.session"
    " LEFT JOIN cold ON cold.session = turns.session AND cold.frozen = 1"
    " WHERE turns.reply_node IS NULL AND n_cached > 0 AND cold.session IS NULL LIMIT 20"
)


def problems(state: StoreState, *, keys: bool) -> list[str]:
    """Inconsistencies; empty if there are none. Call it under the lock."""
    nodes = list(_walk(state))
    found = [problem for node in nodes for problem in _node_problems(state, node)]
    if len(nodes) != len(state.tree.nodes):
        found.append(f"{len(nodes)} nodes are reachable, {len(state.tree.nodes)} are listed")
    found += _sum_problems(state, nodes)
    found += _file_problems(state)
    found += _catalog_problems(state, nodes)
    found += _pin_problems(state, nodes)
    found += state.tree.tips.problems()
    held = list(state.tree.held.values())
    found += [f"{node} was removed from under a request" for node in held if node.removed]
    if keys:
        found += key_problems(state)
    return found


def key_problems(state: StoreState) -> list[str]:
    """Segments whose stored key is not that of their prefix. O(all tokens)."""
    stored = dict(
        state.catalog.rows(
            "SELECT id, key FROM segments WHERE tokenizer = ?", (state.identity.tokenizer,)
        )
    )
    tips = state.tree.tips
    found = [
        f"the tip {id} has the hash of other tokens"
        for id, key in stored.items()
        if id in state.tree.nodes
        and (tip := tips.get(state.tree.nodes[id])) is not None
        and tip.hash.digest() != key
    ]
    found += [
        f"segment {node.id} has the key of other tokens"
        for node, key in state.tree.keys(state.identity.tokenizer_digest)
        if stored.get(node.id) != key
    ]
    return found


def _walk(state: StoreState) -> Iterator[Node]:
    stack = list(state.tree.root.children)
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


def _node_problems(state: StoreState, node: Node) -> Iterator[str]:
    parent = node.parent
    assert parent is not None
    if state.tree.nodes.get(node.id) is not node or node.removed:
        yield f"{node} is in the tree but not listed"
    if parent.p1 != node.p0 or len(node.ids) != node.n * ID_BYTES or node.n <= 0:
        yield f"{node} does not continue {parent}"
    if parent.id and parent.scope not in (public_of(node.scope), node.scope):
        yield f"{node} hangs below another scope"
    if (parent.by_token or {}).get((node.scope, node.first)) is not node:
        yield f"{node} is filed under a wrong token"
    if node.hot is not None and (node.hot.p0, node.hot.p1) != (node.p0, node.p1):
        yield f"{node} has hot rows [{node.hot.p0}, {node.hot.p1})"
    if node.hot is not None and not node.hot.fits(state.fingerprint.layout):
        yield f"{node} has hot rows of another layout"
    file = node.file
    if file is None:
        return
    if state.files.get(file.id) is not file or node not in state.tree.viewers(file):
        yield f"{node} views a file that does not know it"
    if file.p0 + node.file_row0 != node.p0 or node.file_row0 + node.n > file.n_rows:
        yield f"{node} views rows of other positions"


def _sum_problems(state: StoreState, nodes: list[Node]) -> Iterator[str]:
    hot = sum(node.hot.nbytes for node in nodes if node.hot is not None)
    warm = sum(file.nbytes for file in state.files.values())
    if (hot, warm) != (state.hot_bytes, state.warm_bytes):
        yield f"hot and warm bytes are {(hot, warm)}, counted {(state.hot_bytes, state.warm_bytes)}"
    sql = "SELECT coalesce(sum(bytes), 0) FROM files WHERE fingerprint != ?"
    ((foreign,),) = state.catalog.rows(sql, (state.identity.fingerprint,))
    if foreign != state.foreign_bytes:
        yield f"files of other models have {foreign} bytes, counted {state.foreign_bytes}"


def _file_problems(state: StoreState) -> Iterator[str]:
    for file in state.files.values():
        viewers = state.tree.viewers(file)
        if not viewers or any(node.file is not file for node in viewers):
            yield f"{file} is viewed by {viewers}"
        if not file.path.is_file() or file.path.stat().st_size != file.nbytes:
            yield f"{file} is missing or has another size"


def _catalog_problems(state: StoreState, nodes: list[Node]) -> Iterator[str]:
    mine = {node.id: _row(node) for node in nodes}
    stored = {
        row[0]: row[1:]
        for row in state.catalog.rows(
            "SELECT id, coalesce(parent, 0), scope, p0, p1, v.file, coalesce(v.row0, 0), ids"
            " FROM segments LEFT JOIN (SELECT node, file, row0 FROM views JOIN files"
            " ON files.id = file WHERE fingerprint = ?) AS v ON v.node = segments.id"
            " WHERE tokenizer = ?",
            (state.identity.fingerprint, state.identity.tokenizer),
        )
    }
    for id in mine.keys() | stored.keys():
        if mine.get(id) != stored.get(id):
            yield f"segment {id} differs between prefix tree and catalog"
    files = {
        file.id: (file.path.name, file.p0, file.n_rows, file.nbytes, file.runs)
        for file in state.files.values()
    }
    rows = state.catalog.rows(
        "SELECT id, name, p0, n_rows, bytes, runs FROM files WHERE fingerprint = ?",
        (state.identity.fingerprint,),
    )
    if {row[0]: (*row[1:5], decode_runs(row[5], row[3])) for row in rows} != files:
        yield "the files in memory and in the catalog differ"
    for id, name in state.catalog.rows(_LOST):
        yield f"turn {id} of session {name!r} has no tokens, and the session is not frozen"
    yield from state.catalog.problems()


def _row(node: Node) -> tuple[Any, ...]:
    assert node.parent is not None
    file_id = None if node.file is None else node.file.id
    return (
        node.parent.id,
        node.scope,
        node.p0,
        node.p1,
        file_id,
        node.file_row0,
        node.ids,
    )


def _pin_problems(state: StoreState, nodes: list[Node]) -> Iterator[str]:
    pins: Counter[int] = Counter()
    for (id,) in state.catalog.rows("SELECT node FROM pins UNION ALL SELECT node FROM bases"):
        node = state.tree.nodes.get(id)
        for each in node.path() if node is not None else ():
            pins[each.id] += 1
    for node in nodes:
        if node.pins != pins[node.id]:
            yield f"{node} counts {node.pins} pins, has {pins[node.id]}"
