"""Random operations against a model that only knows whole sequences."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_tools import (
    LAYOUT,
    ROW_IDENTITY,
    check_rows,
    insert_in_vain,
    moved_rows_of,
    rows_of,
    turn_of,
)

from towerd.errors import StoreError
from towerd.policy import NAMES
from towerd.slots.layout import NATIVE
from towerd.store import FormatRequest, Handle, Node, Store
from towerd.store.rows.rows import lacks
from towerd.store.sessions.sessions import RECOGNISED_TOKENS_MIN
from towerd.store.tree import tower_ends
from towerd.tiers.ranking import Ranking
from towerd.tokens import Provenance, origin_of

SCOPES = ("a", "b")
ORIGINS = (Provenance.EXACT, Provenance.DERIVED, Provenance.AFTER_MOVED)
SUFFICIENT = (Provenance.EXACT, Provenance.APPROXIMATE)
FORMATS = (NATIVE, "q4h", "q6", "q8ah")
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
Tokens = tuple[int, ...]


def common(a: Tokens, b: Tokens) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class StoreMachine(RuleBasedStateMachine):
    """`sequences` maps each scope to everything inserted; sessions are kept as token lists. A
    ranking hears of everything, and its policies know what the store has after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.now = 0.0
        self.sequences: dict[str, set[Tokens]] = {"a": set(), "b": set(), "public": set()}
        self.needed: dict[str, list[tuple[str, Tokens]]] = {}
        self.current: dict[str, tuple[str, Tokens]] = {}
        self.ends: list[tuple[str, Tokens, str, float]] = []
        self.bases: dict[tuple[str, str], Tokens] = {}
        self.requests: list[tuple[Store, Handle, Tokens]] = []

    @initialize(
        tokens_min=st.sampled_from((1, tower_ends.TOKENS_MIN)),
        policy=st.sampled_from(sorted(NAMES)),
    )
    def open(self, tokens_min: int, policy: str) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tower_ends, "TOKENS_MIN", tokens_min)
        self.policy = policy
        self.open_store()

    def open_store(self) -> None:
        self.store = Store.open(self.root, ROW_IDENTITY, clock=self.clock)
        self.ranking = Ranking(self.policy, self.store, self.clock)
        self.store.listen(self.ranking)
        self.ranking.found(self.store.nodes())

    def close_store(self) -> None:
        self.store.close()

    def clock(self) -> float:
        self.now += 1
        return self.now

    def teardown(self) -> None:
        self.patch.undo()
        self.close_store()
        shutil.rmtree(self.root)

    def pick(self, data: st.DataObject) -> Node:
        nodes = sorted(self.store.nodes(), key=lambda node: node.id)
        return data.draw(st.sampled_from(nodes))

    def has_nodes(self) -> bool:
        return bool(self.store.nodes())

    @rule(ids=TOKENS, scope=st.sampled_from((*SCOPES, "public")), data=st.data())
    def insert(self, ids: list[int], scope: str, data: st.DataObject) -> None:
        ends = data.draw(st.sets(st.integers(1, len(ids)), min_size=1))
        path = self.store.insert(np.array(ids, np.int32), scope, sorted(ends))
        assert ends <= {node.p1 for node in path}
        assert path[-1].prefix_ids().tolist() == ids[: max(ends)]
        assert all(node.scope in ("public", scope) for node in path)
        self.sequences[scope].add(tuple(ids[: max(ends)]))

    @rule(
        ids=TOKENS,
        reply=TOKENS,
        scope=st.sampled_from(SCOPES),
        name=st.sampled_from((None, "x")),
        data=st.data(),
    )
    def commit(
        self, ids: list[int], reply: list[int], scope: str, name: str | None, data: st.DataObject
    ) -> None:
        own = sorted(seq for _, seq in self.current.values())
        is_extended = data.draw(st.booleans())
        if own and is_extended:
            ids = [*data.draw(st.sampled_from(own)), *ids]
        whole = tuple(ids + reply)
        n_cached = data.draw(st.sampled_from((len(whole) - 1, len(whole), len(ids), 0, 1)))
        expected = self.recognised(tuple(ids), scope) if name is None else f"{scope}/{name}"
        result = self.store.commit_turn(
            turn_of(ids, reply, scope=scope, session=name, n_cached=n_cached)
        )
        key = f"{scope}/{result.session_id}"
        assert result.new_session == (key not in self.current)
        if expected is not None:
            assert key == expected
        else:
            assert result.new_session
        self.sequences[scope].add(whole[:n_cached])
        self.current[key] = (scope, whole)
        for end in (min(len(ids), n_cached), n_cached):
            self.ends.append((scope, whole[:end], key, self.now))
            self.needed.setdefault(key, []).append((scope, whole[:end]))

    def recognised(self, prompt: Tokens, scope: str) -> str | None:
        """The deepest turn end that begins `prompt`; of equal ones, the session used last."""
        updated = {key: max(now for _, _, k, now in self.ends if k == key) for key in self.current}
        found = [
            (len(end), updated[key], key)
            for owner, end, key, _ in self.ends
            if owner == scope and len(end) >= RECOGNISED_TOKENS_MIN and prompt[: len(end)] == end
        ]
        return max(found)[2] if found else None

    @precondition(has_nodes)
    @rule(data=st.data(), origin=st.sampled_from(ORIGINS))
    def heat(self, data: st.DataObject, origin: Provenance) -> None:
        """Better rows replace those that are hot already, worse ones do not."""
        node = self.pick(data)
        ids = node.prefix_ids()
        p0 = data.draw(st.integers(0, node.p1 - 1))
        rows = (moved_rows_of if origin == Provenance.AFTER_MOVED else rows_of)(ids, p0)
        before = {each: each.worst_hot for each in node.path()}
        self.store.rows.attach_hot(node.path(), rows, origin=origin)
        for each, was in before.items():
            assert was is None or (each.worst_hot is not None and each.worst_hot <= was)

    @precondition(has_nodes)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        """Rows from a file become hot in the format they have there."""
        node = self.pick(data)
        if node.file is not None and node.hot is None:
            (part,) = self.store.plan_rows(node, node.p0, node.p1)
            rows, origin = self.store.rows.load(part).copy(), origin_of(part.provenance)
            assert self.store.rows.attach_hot([node], rows, origin=origin) == [node]

    @precondition(has_nodes)
    @rule(data=st.data(), everything=st.booleans(), sufficient=st.sampled_from(SUFFICIENT))
    def write(self, data: st.DataObject, everything: bool, sufficient: Provenance) -> None:
        run: list[Node] = []
        for node in reversed(self.pick(data).path()):
            if node.hot is None or (run and run[0].scope != node.scope):
                break
            if not lacks(node.worst_file, node.worst_hot, sufficient):
                break
            run.insert(0, node)
            if not everything:
                break
        if run:
            file = self.store.rows.write(run, sufficient=sufficient)
            assert all(node.file is file for node in run)
            assert all(node.worst_file == node.worst_hot for node in run)

    @precondition(has_nodes)
    @rule(data=st.data(), names=st.lists(st.sampled_from(FORMATS), min_size=1, max_size=3))
    def reencode(self, data: st.DataObject, names: list[str]) -> None:
        """Rows in a stored format stay as they are, native ones get the requested format."""
        file = self.pick(data).file
        if file is None:
            return
        nodes = [node for node in self.store.nodes() if node.file is file]
        p0, p1 = min(n.p0 for n in nodes), max(n.p1 for n in nodes)
        cuts = [data.draw(st.integers(p0, p1)) for _ in names[1:]]
        edges = [p0, *sorted(cuts), p1]
        requests = [
            FormatRequest(a, b, name)
            for a, b, name in zip(edges, edges[1:], names, strict=False)
            if a < b
        ]
        before = {p: file.provenance(p, p + 1)[0] for p in range(p0, p1)}
        new = self.store.rows.reencode(file, requests)
        assert new is not None
        for request in requests:
            for p in range(request.p0, request.p1):
                is_stored = before[p] == Provenance.APPROXIMATE or request.format != NATIVE
                expected = max(before[p], Provenance.APPROXIMATE) if is_stored else before[p]
                assert new.provenance(p, p + 1)[0] == expected

    @precondition(has_nodes)
    @rule(data=st.data(), stop=st.sampled_from((None, "tool_use", "end_turn")))
    def visit(self, data: st.DataObject, stop: str | None) -> None:
        """A request used a path; rows that it lacks are expected, or not."""
        end, is_expected = self.pick(data), data.draw(st.booleans())

        def nbytes(node: Node) -> int:
            if node.hot is not None:
                return node.hot.nbytes
            return self.store.bytes_of(node) if is_expected else 0

        def on_disk(node: Node) -> int:
            return self.store.state.file_bytes(node) or nbytes(node)

        with self.store.locked():
            self.ranking.visited(end.path(), self.clock(), nbytes, on_disk)
        if stop is not None:
            self.ranking.stepped(end, "workflow", "agent")
            self.ranking.answered(end, self.clock(), stop)

    @rule(nbytes=st.integers(1, 20 * LAYOUT.token_bytes))
    def evict(self, nbytes: int) -> None:
        """As the tiers do, but for what has yet to be written."""
        for key in self.ranking.hot_victims(nbytes, lambda key: True):
            assert self.store.rows.drop_hot(self.store.node(key))
        for file in self.ranking.warm_victims(nbytes // 4, lambda file: True):
            assert self.store.rows.drop_file(file)

    @rule(ids=TOKENS, scope=st.sampled_from((*SCOPES, "public")), data=st.data())
    def fail(self, ids: list[int], scope: str, data: st.DataObject) -> None:
        """The commit is refused: the segments are unchanged, and no listener was called."""
        ends = data.draw(st.sets(st.integers(1, len(ids)), min_size=1))
        known = len(self.store.nodes())
        with pytest.raises(StoreError, match="FOREIGN KEY"):
            insert_in_vain(self.store, np.array(ids, np.int32), scope, sorted(ends))
        assert len(self.store.nodes()) == known

    @precondition(has_nodes)
    @rule(data=st.data())
    def cool(self, data: st.DataObject) -> None:
        self.store.rows.drop_hot(self.pick(data))

    @precondition(has_nodes)
    @rule(data=st.data())
    def drop_file(self, data: st.DataObject) -> None:
        node = self.pick(data)
        if node.file is not None:
            self.store.rows.drop_file(node.file)
            assert node.file is None

    @precondition(has_nodes)
    @rule(data=st.data())
    def pin_and_unpin(self, data: st.DataObject) -> None:
        node = self.pick(data)
        if node in self.store.pins.listing():
            self.store.pins.remove(node.id)
        else:
            self.store.pins.add(node.id)
            assert node.pinned

    @rule(ids=TOKENS, public=st.booleans(), name=st.sampled_from(("p", "q")))
    def add_base(self, ids: list[int], public: bool, name: str) -> None:
        base = self.store.bases.add(name, np.array(ids, np.int32), "a", 1, public)
        self.sequences[base.scope].add(tuple(ids))
        self.bases[name, base.scope] = tuple(ids)

    @precondition(lambda self: self.bases)
    @rule(data=st.data())
    def remove_base(self, data: st.DataObject) -> None:
        name, scope = data.draw(st.sampled_from(sorted(self.bases)))
        self.store.bases.remove(name, scope)
        del self.bases[name, scope]

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def delete_session(self, data: st.DataObject) -> None:
        # recognised ids are random: draw by the tokens, which are not
        keys = sorted(self.current, key=lambda key: (self.current[key], key))
        key = keys[data.draw(st.integers(0, len(keys) - 1))]
        scope, id = key.split("/")
        self.store.delete_session(id, scope)
        del self.current[key], self.needed[key]
        self.ends = [end for end in self.ends if end[2] != key]

    @precondition(has_nodes)
    @rule(ids=TOKENS, scope=st.sampled_from(SCOPES), data=st.data())
    def begin(self, ids: list[int], scope: str, data: st.DataObject) -> None:
        """A request that runs from here on, and begins with what is known."""
        known = self.pick(data).prefix_ids().tolist()
        handle = self.store.hold(np.array(known + ids, np.int32), scope)
        handle.match()
        self.requests.append((self.store, handle, tuple(known + ids)))
        if len(self.requests) > 4:
            self.requests.pop(0)[1].release()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, handle, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        handle.release()

    @rule(data=st.data())
    def collect(self, data: st.DataObject) -> None:
        if self.store.nodes():
            self.begin([0], data.draw(st.sampled_from(SCOPES)), data)
        held = [handle.match().nodes for _, handle, _ in self.requests]
        pinned = [
            (node.scope, tuple(node.prefix_ids().tolist())) for node in self.store.pins.listing()
        ]
        self.store.gc()
        needed = [need for needs in self.needed.values() for need in needs] + pinned
        needed += [(scope, ids) for (_, scope), ids in self.bases.items()]
        for scope, ids in needed:
            assert self.store.match(np.array(ids, np.int32), scope).n == len(ids)
        for nodes, (_, handle, _) in zip(held, self.requests, strict=True):
            assert handle.match().nodes == nodes
        ends = [nodes[-1] for nodes in held if nodes]
        needed += [(node.scope, tuple(node.prefix_ids().tolist())) for node in ends]
        kept: dict[str, set[Tokens]] = {scope: set() for scope in self.sequences}
        for node in self.store.nodes():
            ids = tuple(node.prefix_ids().tolist())
            owners = self.sequences if node.scope == "public" else (node.scope,)
            assert any(seq[: len(ids)] == ids for owner in owners for seq in self.sequences[owner])
            kept[node.scope].add(ids)
            if not node.children:
                assert any(need[: len(ids)] == ids for _, need in needed)
        self.sequences = kept

    @rule(lost=st.sampled_from((None, "catalog.sqlite", "journal")))
    def reopen(self, lost: str | None) -> None:
        """Whatever is lost of catalog and journal, the other one has everything."""
        self.close_store()
        self.requests = []
        if lost == "journal":
            shutil.rmtree(self.root / lost)
        elif lost is not None:
            (self.root / lost).unlink()
        self.open_store()
        self.store.check_integrity(keys=True)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule(ids=TOKENS, scope=st.sampled_from(SCOPES))
    def match(self, ids: list[int], scope: str) -> None:
        asked = tuple(ids)
        visible = self.sequences[scope] | self.sequences["public"]
        match = self.store.match(np.array(ids, np.int32), scope)
        assert match.n == max((common(asked, seq) for seq in visible), default=0)
        assert not match.nodes or match.nodes[-1].p0 < match.n <= match.nodes[-1].p1
        planned = sum(part.p1 - part.p0 for part in self.store.plan_rows(match, 0, match.n))
        served = 0
        for node in match.nodes:
            if node.hot is None and node.file is None:
                break
            served = min(node.p1, match.n)
        assert planned == served

    def check(self) -> None:
        self.store.check_integrity()
        self.ranking.check_integrity()

    @invariant()
    def accounts_agree(self) -> None:
        self.check()

    @invariant()
    def requests_know_their_paths(self) -> None:
        for store, handle, ids in self.requests:
            for n in range(1, len(ids) + 1):
                found = store.match(np.array(ids[:n], np.int32), handle.scope)
                assert handle.match(n).n == found.n
            assert handle.match() == store.match(np.array(ids, np.int32), handle.scope)

    @invariant()
    def rows_are_right(self) -> None:
        for node in self.store.nodes():
            for worst in (Provenance.EXACT, Provenance.APPROXIMATE, Provenance.AFTER_MOVED):
                check_rows(self.store, node, worst)
            if node.worst_hot == Provenance.AFTER_MOVED:
                assert node.worst_file in (None, Provenance.AFTER_MOVED)

    @invariant()
    def sessions_are_exact(self) -> None:
        assert len(self.store.sessions()) == len(self.current)
        for key, (scope, ids) in self.current.items():
            assert tuple(self.store.session_ids(key.split("/")[1], scope).tolist()) == ids
