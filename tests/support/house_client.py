"""One of several clients of a simulated store: what it asks for, and what it is told."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from format_oracle import converted
from house_foreign import KNOWN_PICTURE, ForeignChats
from simulated_disk import PowerLost
from simulated_threads import done_without_loop
from simulation import OTHERS_MARK, SCOPE, Tokens, codec, medium_name, named, path_ids
from store_tools import assert_same_rows, ids_of, rows_of
from told import Made

from towerd.cold import cold_history, freeze, thaw, write_copy
from towerd.errors import (
    InvalidRequest,
    NotFound,
    RowsDamaged,
    SessionFrozen,
    StoreError,
    TowerdError,
)
from towerd.store import Node, Turn
from towerd.store.sessions.conversations import ContextItem, ResponseContext
from towerd.store.sessions.frozen import SessionBusy
from towerd.store.sessions.media import SentMedium
from towerd.store.sessions.responses import NewResponse
from towerd.tokens import Ids

if TYPE_CHECKING:
    from house import House

NO_LIMIT = 1 << 30
SHARED = "s"
"""The session that two clients continue."""
STEPS_MAX = 14
N_KINDS = 5
"""Of steps besides turns, in one life."""
PREFIXES = [tuple(random.Random(n).randint(0, 2) for _ in range(n)) for n in (60, 150)]
"""What sessions begin with; of the longer one a part is re-encoded."""
NOT_NOW = (SessionBusy, NotFound, SessionFrozen, InvalidRequest)
"""What other clients may cause."""
KINDS = frozenset(
    "prompt read running search look verify state resume delete rename respond forget freeze copy thaw flush"
    " collect pin base give foreign".split()
)
CROWDED = frozenset(("delete", "freeze", "respond"))
"""Where every client has SHARED alone."""
Values: TypeAlias = Mapping[object, object]
Step: TypeAlias = Callable[[], object]


def state_of(ids: Ids) -> npt.NDArray[np.uint8]:
    """A state that depends on every token."""
    return np.frombuffer(hashlib.blake2b(ids.tobytes()).digest() * 30, np.uint8)


def id_of(name: str) -> str:
    """What the store calls a session or base of this name."""
    return name.partition("@")[0]


class _NotRecorded(TowerdError):
    """A turn or response whose session was deleted while its request ran."""

    def __init__(self) -> None:
        super().__init__("deleted meanwhile")


class Client:
    """Asks for one thing after another, in a thread of its own. Its sessions are its own, but for SHARED."""

    def __init__(self, house: House, name: str, rng: random.Random) -> None:
        self.house, self.name, self.rng = house, name, rng
        self.scope, self._ids = house.tenant_of(name)
        self._own = () if house.is_crowded else (self._named("1"), self._named("2"))
        self._shared = named(self.scope, SHARED)
        """All names are those of `named`."""
        is_sharing = house.is_crowded or self._ids in "ab"
        self._names = (*self._own, *([self._shared] if is_sharing else []))
        self._chats = ForeignChats(name, self.scope, rng, house, self._told)
        self._handed: dict[str, Ids] = {}
        """What has rows of each session, in RAM or on disk."""

    def _named(self, end: str) -> str:
        return named(self.scope, f"{self._ids}{end}")

    def run(self) -> None:
        """All that it does. Raises what it must not be answered with."""
        for _ in range(self.rng.randint(2, STEPS_MAX)):
            step = self.rng.choice(self._steps())
            self.house.operations.append(f"{self.name} {step.__name__[1:]}")
            if self.rng.random() < 0.04:
                self.house.disk.full_left = self.rng.randint(1, 6)
            n_refused = self.house.disk.n_refused
            try:
                step()
            except TowerdError:
                if self.house.disk.is_off:
                    raise PowerLost from None
                # what a full disk kept out of the journal is written again later: nothing is frozen until then
                is_put_off = step == self._freeze and n_refused > 0
                if self.house.disk.n_refused == n_refused and not is_put_off:
                    raise
                self.house.operations.append(f"{self.name} is refused: the disk is full")
            if self.house.disk.is_off:
                raise PowerLost
            self.house.operations.append(f"{self.name} {step.__name__[1:]} is done")
            self.house.scheduler.progress()

    def _steps(self) -> list[Step]:
        reads: list[Step] = [
            self._prompt,
            self._read,
            self._read,
            self._running,
            self._search,
            self._look,
        ]
        states: list[Step] = [self._verify, self._state, self._state, self._resume]
        sessions: list[Step] = [self._delete, self._rename, self._respond, self._forget]
        cold: list[Step] = [self._freeze, self._copy, self._thaw, self._foreign]
        tiers: list[Step] = [
            self._flush,
            self._collect,
            self._pin,
            self._pin,
            self._base,
            self._give,
        ]
        every = [*reads, *states, *sessions, *cold, *tiers]
        kinds = [each for each in every if each.__name__[1:] in self.house.kinds]
        return [*[self._turn] * max(2, len(kinds) // 2), *kinds]

    @contextmanager
    def _told(self, values: Values, *not_now: type[TowerdError]) -> Iterator[Made]:
        """What the block does sets these; errors that it may end with mean that it did not."""
        made = self.house.told.begin(values)
        try:
            yield made
        except not_now:
            self._refused(made)
        except TowerdError:
            if not self.house.disk.is_off:
                self.house.told.refuse(made)
            raise
        else:
            if self.house.disk.is_off:
                raise PowerLost
            self.house.told.acknowledge(made)

    def _refused(self, made: Made) -> None:
        if self.house.disk.is_off:
            raise PowerLost
        self.house.told.refuse(made)

    # --- turns ----------------------------------------------------------------------------

    def _tokens(self, n_max: int = 30) -> Tokens:
        return tuple(self.rng.randint(0, 2) for _ in range(self.rng.randint(1, n_max)))

    def _known(self, name: str) -> Tokens | None:
        found = self.house.told.last("session").get(name)
        return found if isinstance(found, tuple) else None

    def _media(self) -> list[SentMedium]:
        """What a turn has besides tokens: a picture now and then, that others may send, too."""
        if self.rng.random() < 0.8:
            return []
        picture = self.rng.choice((KNOWN_PICTURE, self.rng.randbytes(self.rng.randint(1, 300))))
        return [SentMedium(self.rng.randbytes(16), picture)]

    def _turn(self) -> None:
        """A request: what is stored is read, the answer is recorded, and its rows are handed over."""
        house, name = self.house, self.rng.choice(self._names)
        is_going = self._deletions(name)  # first: one may begin and end while the watch is made
        since = house.recorder.watch_deletions() if self.rng.random() < 0.5 else None
        n_begun = house.n_deletions
        before = self._known(name) or self.rng.choice([(), *PREFIXES])
        if self.rng.random() < 0.5:  # it is said otherwise
            before = before[: self.rng.randint(0, len(before))]
        prompt, reply = (*before, *self._tokens()), self._tokens()
        every = np.array(prompt + reply, np.int32)
        agent = self.rng.choice((None, None, "agent"))
        n_cached = len(every) - self.rng.choice((1, 1, len(reply)))
        turn = Turn(
            self.scope,
            id_of(name),
            every[: len(prompt)],
            every[len(prompt) :],
            n_cached,
            house.clock(),
            agent=agent,
            workflow=None if agent is None else "work",
            since=since,
            media=self._media(),
        )
        self._read_rows(turn.prompt)
        was_deleted = since is not None and any(
            gone == name and n >= n_begun for gone, n in house.deleted
        )
        told: dict[object, object] = {("session", name): prompt + reply}
        kept = {("medium", medium_name(name, each.key)): each.file for each in turn.media}
        n_refused = house.disk.n_refused
        with self._told(told | kept, _NotRecorded):
            for deletion in house.deleting.get(name, ()):
                deletion |= house.told.begin(dict.fromkeys(kept))
            recorded = done_without_loop(house.recorder.record(turn))
            if recorded != turn.session and not house.disk.is_off:
                assert since is not None, f"{name} was recorded as {recorded}"
                assert is_going(), f"{name} was not recorded"
                raise _NotRecorded
            assert not was_deleted or house.disk.is_off, f"{name} was recorded, but deleted before"
            if house.store.disk.bytes_max or house.disk.n_refused > n_refused:
                house.told.begin(
                    dict.fromkeys(kept)
                )  # a turn does without them where there is no room
            house.n_steps += agent is not None
            house.marks.say(name, reply)
        self._hand_over(every[:n_cached], name)

    def _prompt(self) -> None:
        """A prompt without an answer."""
        ids = ids_of(*self.rng.choice(PREFIXES), *self._tokens())
        turn = Turn(self.scope, None, ids, ids_of(), len(ids), self.house.clock())
        done_without_loop(self.house.recorder.record(turn, answered=False))
        self._hand_over(ids)

    def _hand_over(self, ids: Ids, name: str = "") -> None:
        for gap in self.house.tiers.gaps(ids, self.scope):
            self.house.tiers.accept(gap, rows_of(ids[: gap.p1], gap.p0))
        if name in self._own:
            self._handed[name] = ids

    def _read(self) -> None:
        """What is stored of a session, its tokens and rows."""
        name = self.rng.choice(self._names)
        known = self._known(name)
        if known is None:
            return
        self._read_rows(ids_of(*known))
        if name == self._shared:
            return
        try:
            found = self.house.store.session_ids(id_of(name), self.scope)
        except SessionFrozen:
            history = cold_history(self.house.store, codec(), id_of(name), self.scope)
            assert history is not None
            found = history.ids(history.leaf)
        assert tuple(found.tolist()) == known, f"{name} has other tokens"

    def _read_rows(self, ids: Ids) -> None:
        house = self.house
        with house.store.hold(ids, self.scope) as path:
            assert all(each.scope == self.scope for each in path.match().nodes), "rows of others"
            at = 0
            for _, rows in house.tiers.rows(house.tiers.plan(path, 0)):
                assert rows.p0 == at
                at = rows.p1
                assert_same_rows(rows, converted(rows_of(ids[:at], rows.p0), rows.layout))

    def _search(self) -> None:
        """Runs of tokens that are stored anywhere are those tokens."""
        store, ids = self.house.store, ids_of(*self.rng.choice(PREFIXES), *self._tokens())
        for run in store.runs(ids, self.scope, 0, len(ids), usable=lambda node: True):
            assert run.node.scope == self.scope, "a run of others"
            with store.locked():
                if not run.node.removed:
                    found = run.node.prefix_ids()[run.start : run.start + run.n]
                    assert found.tolist() == ids[run.at : run.end].tolist()

    def _look(self) -> None:
        """What is listed, and what it takes."""
        store = self.house.store
        infos = store.sessions()
        store.footprints(infos, with_public=True)
        store.tier_costs(infos)
        store.stats()
        self.house.tiers.stats()

    def _verify(self) -> None:
        report = self.house.store.verify()
        assert not report.problems or self.house.disk.n_refused, report.problems

    def _running(self) -> None:
        """Waits for the thread that follows workflows."""
        self.house.traffic.running(self.scope)

    def _state(self) -> None:
        """States are taken along a session."""
        known = self._known(self.rng.choice(self._names))
        if known is not None:
            ids = ids_of(*known)
            places = [self.rng.randint(1, len(ids)) for _ in range(self.rng.randint(1, 3))]
            states = {place: (state_of(ids[:place]), False) for place in places}
            take = self.rng.choice((self.house.states.accept, self.house.states.keep))
            take(ids, self.scope, states)

    def _resume(self) -> None:
        """The deepest state of a session is that of its tokens."""
        known = self._known(self.rng.choice(self._names))
        if known is None:
            return
        ids, states = ids_of(*known), self.house.states
        with self.house.store.hold(ids, self.scope) as path:
            found = states.deepest(path, 0, len(ids))
            if found is None:
                return
            try:
                data = states.load(found)
            except RowsDamaged:
                assert states.table.at(found.node) is not found, "a state is gone"
            else:
                np.testing.assert_array_equal(data, state_of(ids[: found.position]))

    # --- sessions -------------------------------------------------------------------------

    def _delete(self) -> None:
        house, name = self.house, self.rng.choice(self._names)
        if self._known(name) is None or self.rng.random() < 0.3:
            return
        gone: dict[object, object] = {("session", name): None, ("title", name): None}
        for response, values in house.told.possible("response").items():
            if any(isinstance(kept, tuple) and kept[0] == name for kept in values):
                gone["response", response] = None
        for medium in house.told.possible("medium"):
            if medium.startswith(f"{name}/"):
                gone["medium", medium] = None
        n_before = house.n_deletions
        house.n_deletions += 1
        self._handed.pop(name, None)
        may_be_gone = (NotFound,) if name == self._shared else ()
        with self._told(gone, *may_be_gone) as made:
            house.deleting.setdefault(name, []).append(made)
            try:
                house.store.delete_session(id_of(name), self.scope)
            finally:
                house.deleting[name].remove(made)
            house.deleted.append((name, n_before))
            if name in self._own:
                house.marks.delete(name)
        house.n_deletions += 1

    def _deletions(self, name: str) -> Callable[[], bool]:
        """Whether a session may have been deleted since this call."""
        house = self.house
        n_before, is_going = house.n_deletions, bool(house.deleting.get(name))
        return lambda: is_going or house.n_deletions != n_before

    def _rename(self) -> None:
        name, title = self.rng.choice(self._own), f"title {self.rng.randint(0, 99)}"
        if self._known(name) is not None:
            with self._told({("title", name): title}):
                self.house.store.rename_session(id_of(name), title, self.scope)

    def _respond(self) -> None:
        """A response that continues another one, or none."""
        house, session = self.house, self.rng.choice(self._own or self._names)
        if self._known(session) is None:
            return
        mine = self._own or self._names
        own = {
            response: kept
            for response, kept in house.told.last("response").items()
            if isinstance(kept, tuple) and kept[0] in mine
        }
        before = self.rng.choice(["", *sorted(own)])
        name = f"{self.name}{self.rng.randint(0, 1 << 32)}"
        items = [
            ContextItem(id, b'{"id": "%s"}' % id.encode()) for id in (f"q-{name}", f"a-{name}")
        ]
        said = own[before][1] if before else ()
        body = b'{"id": "%s", "output": [%s]}' % (name.encode(), items[1].body)
        kept, key = (session, (*said, *(item.name for item in items))), ("response", name)
        is_going, told = self._deletions(session), house.told
        is_sure = None not in told.allowed(("session", session)) and (
            not before or None not in told.allowed(("response", before))
        )
        with self._told({key: kept}, _NotRecorded):
            for deletion in house.deleting.get(session, ()):
                deletion |= house.told.begin({key: None})
            try:
                context = (
                    house.store.responses.context(self.scope, before)
                    if before
                    else ResponseContext()
                )
                new = NewResponse(self.scope, name, context, items[:1], items[1:], body)
                is_kept = house.store.keep_response(new, id_of(session), self.scope)
            except NotFound:
                is_kept = False
            if not is_kept and not house.disk.is_off:
                assert session == self._shared, f"{name} was not kept"
                assert is_going() or not is_sure, f"{name} was not kept"
                raise _NotRecorded

    def _forget(self) -> None:
        own = [
            response
            for response, kept in self.house.told.last("response").items()
            if isinstance(kept, tuple) and kept[0] in self._own
        ]
        if own:
            name = self.rng.choice(sorted(own))
            with self._told({("response", name): None}):
                self.house.store.responses.delete(self.scope, name)

    def _freeze(self) -> None:
        name = self.rng.choice(self._names)
        if self._known(name) is not None:
            self._handed.pop(name, None)
            with self._told({}, *NOT_NOW):
                freeze(self.house.store, codec(), id_of(name), self.scope, form="packed")

    def _copy(self) -> None:
        name = self.rng.choice(self._names)
        if self._known(name) is not None:
            with self._told({}, *NOT_NOW):
                write_copy(self.house.store, codec(), id_of(name), self.scope, form="packed")

    def _thaw(self) -> None:
        name = self.rng.choice(self._names)
        if self._known(name) is not None:
            with self._told({}, *NOT_NOW):
                thaw(self.house.store, codec(), id_of(name), self.scope)

    def _foreign(self) -> None:
        """Chats of another tokenizer."""
        self.rng.choice(
            (
                self._chats.bring,
                self._chats.bring,
                self._chats.bring_again,
                self._chats.read,
                self._chats.leave,
            )
        )()

    # --- rows -----------------------------------------------------------------------------

    def _node(self) -> Node | None:
        nodes = sorted(self.house.store.nodes(), key=lambda node: node.id)
        return self.rng.choice(nodes) if nodes else None

    def _pin(self) -> None:
        store, node = self.house.store, self._node()
        if node is None:
            return
        if self.rng.random() < 0.5:
            pins = store.pins.listing()
            if not pins:
                return
            node = self.rng.choice(pins)
            with self._told({("pin", path_ids(node)): None}, NotFound):
                store.pins.remove(node.id)
        else:
            with self._told({("pin", path_ids(node)): True}, NotFound):
                store.pins.add(node.id)

    def _base(self) -> None:
        store, name = self.house.store, self._named("-base")
        if name in self.house.told.last("base"):
            with self._told({("base", name): None}):
                store.bases.remove(id_of(name), self.scope)
        else:
            ids = self.rng.choice(PREFIXES)[: self.rng.randint(40, 150)]
            path = ids if self.scope == SCOPE else (OTHERS_MARK, *ids)
            with self._told({("base", name): path}):
                store.bases.add(id_of(name), ids_of(*ids), self.scope, 1, False)

    def _flush(self) -> None:
        """Rows that were handed over are there, unless there is no room for them."""
        house = self.house
        house.tiers.flush()
        if not house.has_room or house.disk.n_refused or house.disk.is_off:
            return
        for name, ids in self._handed.items():
            with house.store.hold(ids, self.scope) as path:
                plan = house.tiers.plan(path, 0)
                nodes = path.match().nodes
            assert plan.n == len(ids), f"{name} has {plan.n} rows of {len(ids)}"
            unwritten = [node.id for node in nodes if node.file is None and not node.removed]
            assert not unwritten, f"{unwritten} of {name} have no file after a flush"

    def _give(self) -> None:
        """RAM is short."""
        self.house.tiers.giver.ask()

    def _collect(self) -> None:
        try:
            self.house.store.gc()
        except StoreError:
            if not self.house.disk.n_refused:
                raise
