"""A store's lives on a simulated disk, all drawn from one seed, and what it must then have."""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest.mock import patch

from simulated_disk import PowerLost, SimulatedDisk, calls_to, flip_bit
from simulated_sqlite import sqlite_on
from store_tools import ROW_IDENTITY, check_rows, ids_of, make_hot, turn_of

from towerd.codec import Codec
from towerd.cold import cold_history, freeze, thaw
from towerd.errors import RowsDamaged, SessionFrozen, StoreError, ThawError, TokensLost
from towerd.policy import NAMES
from towerd.store import FormatRequest, Node, Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.sessions.conversations import ContextItem, ResponseContext
from towerd.store.sessions.responses import NewResponse
from towerd.store.sessions.turn import SessionInfo
from towerd.tiers.ranking import Ranking
from towerd.tokens import Ids

LIVES = 4
STEPS_MAX = 14
SCOPE = "local"
OTHERS_MARK = -1
PID = 1
"""Every process is this one."""
_LOST = "has no tokens"
Tokens = tuple[int, ...]
Items = tuple[str, ...]


@dataclass
class Acknowledged:
    """What the store has said is durable."""

    sessions: dict[str, Tokens] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    pins: set[Tokens] = field(default_factory=set)
    bases: dict[str, Tokens] = field(default_factory=dict)
    written: set[Tokens] = field(default_factory=set)
    """Paths whose last node has rows in a file."""
    responses: dict[str, tuple[str, Items]] = field(default_factory=dict)
    """The session of each response, and the items up to its own."""
    media: dict[str, bytes | None] = field(default_factory=dict)
    """The files of the sessions' media; None: damaged."""

    def said(self) -> tuple[object, ...]:
        """Everything but rows, which may be lost to damage."""
        return self.sessions, self.titles, self.pins, self.bases, self.responses, self.media

    def each(self) -> dict[object, object]:
        """The same, each for itself."""
        every: dict[object, object] = {("pin", ids): True for ids in self.pins}
        every |= {("session", id): ids for id, ids in self.sessions.items()}
        every |= {("title", id): title for id, title in self.titles.items()}
        every |= {("medium", name): file or "damaged" for name, file in self.media.items()}
        every |= {("response", id): kept for id, kept in self.responses.items()}
        return every | {("base", name): ids for name, ids in self.bases.items()}


class Simulation:
    """The lives of one store. Each ends with a power cut or a clean stop."""

    kind = "store"

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.jumps = random.Random(seed)  # of its own: a log line asks for the time, too
        self.folder = folder
        self.now = 1e9
        self.known = Acknowledged()
        self.possible: list[Acknowledged] = [self.known]
        """States in which the store may be found: before and after what the power cut met."""
        self.flushed: list[Acknowledged] | None = None
        """What was acknowledged since the last flush, that first; the journal alone has one of them."""
        self.is_flipped = False
        self.flipped = ""
        """The file in which a bit has just flipped."""
        self.is_torn = False
        """A lost catalog is to be rebuilt from a journal whose end a power cut has torn."""
        self.has_lost_turns = False
        """Turns may have no tokens since then."""
        self.is_short = False
        """A full disk may have kept something out of the journal, which is written again by the next
        flush: until then nothing is frozen."""
        self.is_behind = False
        """A full disk let files go before the catalog heard of it: the next start forgets them."""
        self.operations: list[str] = []
        self.policy = self.rng.choice(sorted(NAMES))

    def clock(self) -> float:
        """Seconds, which may jump either way."""
        self.now += self.jumps.choice((0.0, 1e-3, 1.0, 60.0, 1e6, -3600.0))
        return self.now

    def run(self, prepare: Callable[[Path], None]) -> None:
        """Live and check. prepare: called with the store's directory. Raises AssertionError, or whatever the store
        should not raise."""
        root = self.folder / "0"
        root.mkdir()
        prepare(root)
        for life in range(LIVES):
            cut_at = self.rng.choice((None, self.rng.randint(1, 90), self.rng.randint(60, 400)))
            self.disk = disk = SimulatedDisk(root, cut_at)
            with edges_on(disk, self.rng, self.clock):
                self._live()
            self.operations += [f"life {life}: {each}" for each in disk.trace[-6:]]
            self.operations.append(f"life {life} ends: {'power cut' if disk.is_off else 'stop'}")
            root = self.folder / str(life + 1)
            disk.after_cut(root, self.rng)
            self._damage(root, disk.is_off)
        self.disk = SimulatedDisk(root, None)
        with edges_on(self.disk, self.rng, self.clock), self._opened() as store:
            self._check(store)

    def _damage(self, root: Path, is_cut: bool) -> None:
        segments = sorted((root / "segments").glob("*"))
        if segments and self.rng.random() < 0.15:
            self.is_flipped = True
            self.operations.append("a bit flips in a segment file")
            path = self.rng.choice(segments)
            if flip_bit(path, self.rng):
                self.flipped = path.name
        elif self.flushed is not None and self.rng.random() < 0.3:
            self.operations.append("the catalog is lost")
            self.is_torn |= is_cut
            self.possible = [*self.flushed, *self.possible]
            for name in ("catalog.sqlite", "catalog.sqlite-wal"):
                (root / name).unlink(missing_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        store = Store.open(self.disk.root, ROW_IDENTITY, clock=self.clock)
        try:
            self.ranking = Ranking(self.policy, store, self.clock)
            store.listen(self.ranking)
            self.ranking.found(store.nodes())
            yield store
            self.operations.append("close")
            store.close()
        except BaseException:
            self.disk.is_off = True
            with suppress(Exception, PowerLost):  # of a process that is gone: only descriptors
                store.close()
            raise

    def _live(self) -> None:
        try:
            with self._opened() as store:
                self._check(store)
                self.flushed, self.is_behind, self.is_short = None, False, False
                for _ in range(self.rng.randint(1, STEPS_MAX)):
                    self._step(store)
                    if not self.is_behind:
                        self._check_integrity(store)
                    self.ranking.check_integrity()
            self.flushed = [self.known]
        except PowerLost:
            pass
        except StoreError:
            if not self.disk.is_off:
                raise

    def _step(self, store: Store) -> None:
        steps = (
            self._commit,
            self._commit,
            self._commit,
            self._write,
            self._write,
            self._reencode,
            self._pin,
            self._base,
            self._rename,
            self._respond,
            self._respond,
            self._forget,
            self._delete,
            self._freeze,
            self._thaw,
            self._collect,
            self._evict,
            self._flush,
        )
        step = self.rng.choice(steps)
        after = deepcopy(self.known)
        action = step(store, after)
        if action is None:
            return
        self.operations.append(f"{step.__name__[1:]}, from change {self.disk.n_changes + 1}")
        self.possible = [self.known, after]
        self.disk.is_full = self.rng.random() < 0.05
        try:
            action()
        except StoreError:
            is_put_off = self.is_short and step == self._freeze
            if self.disk.is_off or not (self.disk.is_full or is_put_off):
                raise
            self.operations.append("the disk is full" if self.disk.is_full else "not frozen now")
            self._refused(store)
            return
        finally:
            self.is_behind |= self.disk.is_full and step in (
                self._evict,
                self._reencode,
                self._collect,
            )
            self.is_short |= self.disk.is_full
            self.disk.is_full = False
        if self.disk.is_off:
            raise PowerLost
        self.known = after
        self.possible = [after]
        if self.flushed is not None:
            self.flushed.append(after)

    def _refused(self, store: Store) -> None:
        """The store says no and is as it was; rows may have gone, as before a rewrite."""
        assert found_in(store).said() == self.known.said()
        self.known = deepcopy(self.known)
        self.known.written &= found_in(store).written
        self.possible = [self.known]

    # --- what a store is asked for --------------------------------------------------------

    def _tokens(self, n_max: int = 30) -> Tokens:
        return tuple(self.rng.randint(0, 2) for _ in range(self.rng.randint(1, n_max)))

    def _node(self, store: Store) -> Node | None:
        nodes = sorted(store.nodes(), key=lambda node: node.id)
        return self.rng.choice(nodes) if nodes else None

    def _commit(self, store: Store, after: Acknowledged) -> Callable[[], object]:
        name = self.rng.choice("abcd")
        prompt = (*self.known.sessions.get(name, ()), *self._tokens())
        reply = self._tokens()
        after.sessions[name] = prompt + reply
        after.titles.setdefault(name, "")

        def commit() -> None:
            result = store.commit_turn(turn_of(prompt, reply, session=name))
            if not self.disk.is_off:
                after.titles[name] = store.session(name).title
            with store.locked():
                self.ranking.visited(
                    result.node.path(), self.clock(), store.ram_bytes, store.bytes_of
                )
            self.ranking.settle()

        return commit

    def _write(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        end = self._node(store)
        if end is None or end.file is not None:
            return None
        run: list[Node] = []
        for node in reversed(end.path()):
            if node.file is not None or (run and run[0].scope != node.scope):
                break
            run.insert(0, node)
        after.written |= {path_ids(node) for node in run}

        def write() -> None:
            make_hot(store, end)
            store.rows.write(run)

        return write

    def _reencode(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        files = sorted(store.files(), key=lambda file: file.path.name)
        if not files:
            return None
        file, name = self.rng.choice(files), self.rng.choice(("q4h", "q6", "q8ah"))
        after.written &= after.written
        request = FormatRequest(file.p0, file.p0 + file.n_rows, name)

        def reencode() -> None:
            with suppress(*self._damage_errors()):
                store.rows.reencode(file, [request])
            after.written &= found_in(store).written if self.is_flipped else after.written

        return reencode

    def _damage_errors(self) -> tuple[type[Exception], ...]:
        return (RowsDamaged,) if self.is_flipped else ()

    def _pin(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        node = self._node(store)
        if node is None:
            return None
        if node in store.pins.listing():
            after.pins.discard(path_ids(node))
            return lambda: store.pins.remove(node.id)
        after.pins.add(path_ids(node))
        return lambda: store.pins.add(node.id)

    def _base(self, store: Store, after: Acknowledged) -> Callable[[], object]:
        name, ids = self.rng.choice("pq"), self._tokens()
        if name in self.known.bases:
            del after.bases[name]
            return lambda: store.bases.remove(name, SCOPE)
        after.bases[name] = ids
        return lambda: store.bases.add(name, ids_of(*ids), SCOPE, 1, False)

    def _rename(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        if not self.known.sessions:
            return None
        name = self.rng.choice(sorted(self.known.sessions))
        title = after.titles[name] = f"title {self.rng.randint(0, 99)}"
        return lambda: store.rename_session(name, title)

    def _delete(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        if not self.known.sessions or self.rng.random() < 0.5:
            return None
        name = self.rng.choice(sorted(self.known.sessions))
        del after.sessions[name], after.titles[name]
        after.responses = {
            response: kept for response, kept in after.responses.items() if kept[0] != name
        }
        return lambda: store.delete_session(name)

    def _freeze(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        if not self.known.sessions:
            return None
        name = self.rng.choice(sorted(self.known.sessions))

        def freeze_it() -> None:
            with suppress(*((TokensLost,) if self.has_lost_turns else ())):
                freeze(store, codec(), name, form="packed")

        return self._without_rows(store, after, freeze_it)

    def _thaw(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        if not self.known.sessions:
            return None
        name = self.rng.choice(sorted(self.known.sessions))
        return lambda: thaw(store, codec(), name)

    def _respond(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        """A response that continues another one, or none."""
        if not self.known.sessions:
            return None
        session = self.rng.choice(sorted(self.known.sessions))
        before = self.rng.choice(["", *sorted(self.known.responses)])
        name = f"r{self.rng.randint(0, 1 << 32)}"
        own = [ContextItem(id, b'{"id": "%s"}' % id.encode()) for id in (f"q-{name}", f"a-{name}")]
        said = self.known.responses[before][1] if before else ()
        after.responses[name] = session, (*said, *(item.name for item in own))
        body = b'{"id": "%s", "output": [%s]}' % (name.encode(), own[1].body)

        def respond() -> None:
            context = store.responses.context(SCOPE, before) if before else ResponseContext()
            new = NewResponse(SCOPE, name, context, own[:1], own[1:], body)
            assert store.keep_response(new, session, SCOPE) or self.disk.is_off

        return respond

    def _forget(self, store: Store, after: Acknowledged) -> Callable[[], object] | None:
        if not self.known.responses:
            return None
        name = self.rng.choice(sorted(self.known.responses))
        del after.responses[name]
        return lambda: store.responses.delete(SCOPE, name)

    def _collect(self, store: Store, after: Acknowledged) -> Callable[[], object]:
        return self._without_rows(store, after, store.gc)

    def _without_rows(
        self, store: Store, after: Acknowledged, action: Callable[[], object]
    ) -> Callable[[], object]:
        """Rows may go at any moment of it; the rest stays."""
        after.written.clear()
        self.known = deepcopy(self.known)
        written, self.known.written = self.known.written, set()

        def act() -> None:
            action()
            after.written = written & found_in(store).written

        return act

    def _evict(self, store: Store, after: Acknowledged) -> Callable[[], object]:
        self.known = deepcopy(self.known)
        n_bytes, written = self.rng.randint(1, 4000), self.known.written
        files = self.ranking.warm_victims(n_bytes, lambda file: True)
        gone = {path_ids(node) for file in files for node in store.viewers(file)}
        after.written = self.known.written = written - gone

        def evict() -> None:
            for key in self.ranking.hot_victims(n_bytes, lambda key: True):
                assert store.rows.drop_hot(store.node(key))
            for file in files:
                store.rows.drop_file(file)

        return evict

    def _flush(self, store: Store, after: Acknowledged) -> Callable[[], object]:
        def flush() -> None:
            self.ranking.keep(now=True)
            store.flush()
            if not self.disk.is_off:
                self.flushed = []

        return flush

    # --- what it must have ----------------------------------------------------------------

    def _check_named(self, store: Store) -> None:
        """The file in which a bit has flipped is named by `verify`, unless it was refused already."""
        if self.flipped in {file.path.name for file in store.files()}:
            problems = store.verify().problems
            assert any(self.flipped in each for each in problems), f"{self.flipped}: {problems}"
        self.flipped = ""

    def _check(self, store: Store) -> None:
        self._check_named(store)
        if self.is_torn:
            self.has_lost_turns = True
            _delete_lost(store)
        found = found_in(store)
        candidates = [each for each in self.possible if each.said() == found.said()]
        if self.is_torn:
            if not candidates:
                self._check_each(found)
            every = (each.written for each in self.possible)
            candidates = [Acknowledged(written=set.intersection(*every))]
        assert candidates, f"found {found.said()}, acknowledged {self.possible[0].said()}"
        for node in store.nodes():
            with suppress(*self._damage_errors()):
                check_rows(store, node)
        if self.is_flipped:
            found = found_in(store)
        else:
            lost = [each.written - found.written for each in candidates]
            assert not all(lost), f"rows that were written are gone: {lost}"
            problems = store.verify().problems
            assert all(self.has_lost_turns and _LOST in each for each in problems), problems
        self._check_integrity(store)
        self.known = found
        self.possible = [found]
        self.is_torn = False

    def _check_integrity(self, store: Store) -> None:
        try:
            store.check_integrity(keys=True)
        except AssertionError as error:
            if not (self.has_lost_turns and all(_LOST in each for each in str(error).split("; "))):
                raise

    def _check_each(self, found: Acknowledged) -> None:
        """Each of what was found is as it was at some moment since the flush: the changes of which the
        journal has lost some may be missing, and those that build on them."""
        states, now = [each.each() for each in self.possible], found.each()
        for what in {key for state in (now, *states) for key in state}:
            past = [state.get(what) for state in states]
            assert now.get(what) in past, f"{what}: found {now.get(what)}, acknowledged {past}"


def path_ids(node: Node) -> Tokens:
    """The tokens up to a node's end, those of other tenants behind a mark."""
    ids = tuple(node.prefix_ids().tolist())
    return ids if node.scope == SCOPE else (OTHERS_MARK, *ids)


def named(scope: str, name: str) -> str:
    """A name that tenants do not have in common."""
    return name if scope == SCOPE else f"{name}@{scope}"


def _delete_lost(store: Store) -> None:
    """Delete the sessions that have no turn with tokens left, as their error says."""
    for info in store.sessions():
        try:
            _ids_of_session(store, info.id)
        except (TokensLost, ThawError):
            store.delete_session(info.id)


@cache
def codec() -> Codec:
    return Codec(KeptVocabulary([b"a", b"b", b"c"], [b""] * 3))


def _ids_of_session(store: Store, id: str, scope: str | None = None) -> Ids:
    try:
        return store.session_ids(id, scope)
    except SessionFrozen:
        history = cold_history(store, codec(), id, scope)
        assert history is not None
        return history.ids(history.leaf)


def found_in(store: Store) -> Acknowledged:
    """What a store says that it has."""
    infos = store.sessions()
    ids = {(each.scope, each.id): _ids_of_session(store, each.id, each.scope) for each in infos}
    return Acknowledged(
        {named(*which): tuple(found.tolist()) for which, found in ids.items()},
        {named(info.scope, info.id): info.title for info in infos},
        {path_ids(node) for node in store.pins.listing()},
        {
            named(base.scope, base.name): path_ids(store.node(base.node))
            for base in store.bases.listing()
        },
        {path_ids(node) for node in store.nodes() if node.file is not None},
        dict(_responses(store)),
        dict(_media(store, infos)),
    )


def medium_name(session: str, key: bytes) -> str:
    """The name of a session's medium."""
    return f"{session}/{key.hex()}"


def _media(store: Store, infos: Iterable[SessionInfo]) -> Iterator[tuple[str, bytes | None]]:
    for info in infos:
        row = store.media.session(info.id, info.scope)
        assert row is not None, f"{info.id} is listed and has no row"
        for key in sorted(store.media.keys(row)):
            yield medium_name(named(info.scope, info.id), key), store.media.file(row, key)


def _responses(store: Store) -> Iterator[tuple[str, tuple[str, Items]]]:
    sql = (
        "SELECT responses.name, responses.scope, sessions.id FROM responses"
        " LEFT JOIN sessions ON sessions.pk = session WHERE hidden = 0"
    )
    with store.locked():
        rows = store.state.catalog.rows(sql)
    for name, scope, session in rows:
        items = store.responses.context(scope, name).items
        assert json.loads(store.responses.body(scope, name))["id"] == name, "another one's body"
        yield name, (named(scope, session), tuple(json.loads(item)["id"] for item in items))


@contextmanager
def edges_on(disk: SimulatedDisk, rng: random.Random, clock: Callable[[], float]) -> Iterator[None]:
    """Files, SQLite's files, the clock and random names are the simulation's, inside the block."""
    with (
        calls_to(disk),
        sqlite_on(disk),
        patch.object(os, "getpid", lambda: PID),
        patch.object(time, "time", clock),
        patch.object(time, "time_ns", lambda: int(clock() * 1e9)),
        patch.object(secrets, "randbits", rng.getrandbits),
        patch.object(secrets, "token_hex", lambda n: rng.randbytes(n).hex()),
        patch.object(secrets, "token_bytes", rng.randbytes),
    ):
        yield
