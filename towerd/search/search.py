"""Search over all conversations of a store: kept up to date behind the requests, never before them.

A recorded turn is entered by a background thread, once no request runs: the next turn often follows
at once, and reading a vocabulary beside it would cost it a third of its time. At the start, and after
anything went wrong, that thread compares the index with the catalog, and enters what is missing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from towerd.cold.coding import Coding
from towerd.errors import (
    NotFound,
    NotSupported,
    TowerdError,
    Unavailable,
)
from towerd.search.file import FILE_NAME, remove_index
from towerd.search.index import Hit, Passage, SearchIndex, SessionKey
from towerd.search.reading import TurnReader, leaf_of
from towerd.search.speech import first_question, spoken
from towerd.store import SessionInfo, Store
from towerd.store.sessions.turn import Turn, TurnResult
from towerd.system.priority import lower_priority
from towerd.tokens import Ids, common_prefix, ids_array, ids_bytes

log = logging.getLogger(__name__)

PAGE = 200
"""Sessions that are compared with the catalog at once."""
LAST_TURNS_MAX = 8
"""Sessions whose last turn stays in memory, to tell what their next one adds."""
FRESH_TURNS_MAX = 16
"""Turns of a session whose title is read from its tokens where the index does not know it yet."""
QUEUE_MAX = 1024
"""Turns that wait to be entered. Beyond it they are found by a comparison."""
QUIET_S = 1.0
"""How long no request ran before a turn is entered, or a comparison continues."""
TURN_S_MAX = 10.0
"""How long a turn waits for that; then it is entered beside the requests."""
AGAIN_S = 60.0
"""How long after a failure the index is compared or scrubbed again."""
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class _Recorded:
    turn: Turn
    result: TurnResult
    since_s: float
    """When it was committed; time.monotonic."""


class Search:
    """The search index of an open store, and the titles of its sessions. Thread-safe.

    Without `start` nothing is entered, and what was deleted leaves all the same."""

    def __init__(self, store: Store, coding: Coding, index: SearchIndex | None) -> None:
        """index: None if nothing shall be searched, or its file cannot be opened."""
        self.reader = TurnReader(store, coding)
        self._store = store
        self._index = index
        self._queue: queue.Queue[object] = queue.Queue(QUEUE_MAX)
        self._last: OrderedDict[SessionKey, Ids] = OrderedDict()
        self._idle_s: Callable[[], float] = lambda: 0.0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._compare_at = 0.0
        self._comparison: Iterator[bool] | None = None
        self._scrub_at = 0.0
        """An earlier process may have ended before it scrubbed what it removed."""

    def start(self, idle_s: Callable[[], float]) -> None:
        """Begin to fill the index. idle_s: seconds since the last request ended, 0 while one runs."""
        if self._index is None:
            return
        self._idle_s = idle_s
        self._thread = threading.Thread(
            target=self._work, args=(self._index,), name="towerd-search", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop filling it, and close it."""
        self._closing.set()
        if self._thread is not None:
            self._put(None)
            self._thread.join()
        if self._index is not None:
            self._index.close()

    # --- what requests call ------------------------------------------------------------------

    def recorded(self, turn: Turn, result: TurnResult) -> None:
        """A turn was committed, on whatever thread. Returns at once."""
        self._put(_Recorded(turn, result, time.monotonic()))

    def changed(self) -> None:
        """Sessions came without being recorded. Returns at once."""
        self._compare_at = 0.0
        self._put(None)

    def deleted(self, id: str) -> None:
        """A session with this id was deleted: it leaves the index now. A failure is logged, and what
        is not in the catalog is not shown."""
        index = self._index
        if index is None:
            return
        try:
            gone = [key for key in index.keys(id) if not self._exists(key)]
            if not index.forget(gone):
                return
        except TowerdError as error:
            log.warning("a deleted session is still in the index", extra={"error": error.message})
            self.changed()
            return
        for key in gone:
            self._last.pop(key, None)
        self._scrub_at = 0.0
        if self._thread is None:
            self._clean(index)
        else:
            self._put(None)

    def erase(self) -> None:
        """Nothing stays in the index's file of sessions that the catalog does not have: some process
        may have been killed between their deletion and `deleted`. Raises StoreError."""
        index = self._index
        if index is None:
            return
        try:
            index.forget([key for key in index.keys() if not self._is_of_now(index, key)])
        except Unavailable:  # it is damaged, and derived: an empty one takes its place
            index.repair()
        self.changed()  # one of the same name has to be entered again
        self._clean(index)

    def renew_key(self) -> None:
        """Have nothing of the index need an earlier key of the store. Raises StoreError."""
        if self._index is not None:
            self._index.renew_key()
            self.changed()  # an empty one may have taken its place

    def _is_of_now(self, index: SearchIndex, key: SessionKey) -> bool:
        known = index.indexed(key)
        return known is not None and self._of(key, known.created) is not None

    def _of(self, key: SessionKey, created: float) -> SessionInfo | None:
        """The session with this name that was created then; None if it was deleted since."""
        try:
            info = self.reader.info(key)
        except NotFound:
            return None
        return info if (info.scope, info.created) == (key.scope, created) else None

    def find(self, typed: str, scope: str | None, limit: int) -> list[tuple[Hit, SessionInfo]]:
        """The conversations of a tenant (None: of all) in which all that was typed occurs in one
        turn, the best match first. Raises StoreError, Unavailable, NotSupported."""
        if self._index is None:
            raise NotSupported("Conversations are not indexed here: start the daemon with --search")
        found: list[tuple[Hit, SessionInfo]] = []
        try:
            hits = self._index.search(typed, scope, limit)
        except Unavailable:
            self.changed()
            raise
        for hit in hits:
            info = self._of(hit.session, hit.created)
            if info is not None:
                found.append((hit, info))
            else:
                self.changed()
        return found

    def titles(self, infos: Sequence[SessionInfo]) -> list[str]:
        """The title of each session: the one that it was given, or else its first question; ""
        while that is not known."""
        keys = [self.reader.key(info) for info in infos]
        untitled = [key for key, info in zip(keys, infos, strict=True) if not info.title]
        questions: dict[tuple[SessionKey, float], str] = {}
        try:
            if self._index is not None:
                questions = self._index.questions(untitled)
        except TowerdError as error:
            log.warning("titles are not known", extra={"error": error.message})
        both = zip(keys, infos, strict=True)
        return [
            info.title or questions.get((key, info.created)) or self._question(info)
            for key, info in both
        ]

    def _question(self, info: SessionInfo) -> str:
        """The first question of a session that is so new that the index need not have it yet."""
        if info.cold_bytes or info.tokenizer or not 0 < info.n_turns <= FRESH_TURNS_MAX:
            return ""
        try:
            return self.reader.passages(info, set())[1]
        except TowerdError:
            return ""

    def stats(self) -> dict[str, int]:
        """Gauges for /towerd/v1/stats."""
        n, n_bytes = (0, 0) if self._index is None else self._index.size()
        return {"search_sessions": n, "search_bytes": n_bytes}

    # --- the thread --------------------------------------------------------------------------

    def _put(self, item: object) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._compare_at = 0.0

    def _work(self, index: SearchIndex) -> None:
        lower_priority()
        while not self._closing.is_set():
            try:
                item = self._queue.get(timeout=self._wait_s())
            except queue.Empty:
                item = None
            try:
                if isinstance(item, _Recorded):
                    self._await_quiet(item.since_s + TURN_S_MAX)
                    self._enter_turn(index, item)
                else:
                    self._rest(index)
            except Exception as error:
                self._failed(error)

    def _wait_s(self) -> float | None:
        """How long the thread waits for a turn before it looks whether it may compare."""
        if self._comparison is not None:
            return 0.0 if self._is_quiet() else QUIET_S
        due_s = min(self._compare_at, self._scrub_at) - time.monotonic()
        return None if due_s == NEVER else max(due_s, QUIET_S)

    def _await_quiet(self, until_s: float) -> None:
        """Wait until no request runs, but not beyond `until_s`."""
        while not self._is_quiet() and time.monotonic() < until_s:
            if self._closing.wait(QUIET_S / 4):
                return

    def _is_quiet(self) -> bool:
        return self._idle_s() >= QUIET_S

    def _failed(self, error: Exception) -> None:
        """Nothing waits for the index: what it lacks is entered later."""
        if self._closing.is_set():
            return
        unexpected = None if isinstance(error, TowerdError) else error
        log.warning("the search index is behind", exc_info=unexpected, extra={"error": str(error)})
        self._comparison = None
        self._compare_at = time.monotonic() + AGAIN_S

    def _rest(self, index: SearchIndex) -> None:
        """No turn waits: clean up, and continue a comparison."""
        if self._scrub_at <= time.monotonic():
            self._clean(index)
        if self._comparison is None and self._compare_at <= time.monotonic():
            self._compare_at = NEVER
            self._comparison = self._compare(index)
        if self._comparison is not None and self._is_quiet():
            if not next(self._comparison, False):
                self._comparison = None

    def _clean(self, index: SearchIndex) -> None:
        """Scrub the index; later again if that fails, or another process reads just then."""
        self._scrub_at = NEVER
        why = "it is being read"
        try:
            if index.scrub():
                return
        except TowerdError as error:
            why = error.message
        self._scrub_at = min(self._scrub_at, time.monotonic() + AGAIN_S)
        log.warning("deleted words stay in the index", extra={"error": why})

    def _enter_turn(self, index: SearchIndex, item: _Recorded) -> None:
        """Enter a turn: what its tokens have beyond those of the turn before."""
        turn, result = item.turn, item.result
        try:
            info = self._store.session(result.session_id, turn.scope)
        except NotFound:
            return
        key = self.reader.key(info)
        ids = ids_array(ids_bytes(turn.prompt) + ids_bytes(turn.reply))
        last = self._last.pop(key, None)
        if result.new_session:
            last = None  # of one that another process deleted
        self._last[key] = ids
        while len(self._last) > LAST_TURNS_MAX:
            self._last.popitem(last=False)
        known = index.indexed(key)
        is_whole = known is not None and known.whole is not None
        if is_whole or (last is None and not result.new_session):
            self._enter(index, info, *self._read(index, info))
            return
        n_old = common_prefix(ids, last) if last is not None else 0
        said = self.reader.said(ids[n_old:])
        question = ""
        if result.new_session:
            question = first_question(self.reader.said(ids[: len(turn.prompt)]))
        passage = Passage(result.turn_id, info.updated, spoken(said))
        if index.add(key, info.created, [passage], question):
            self._scrub_at = 0.0
        self._leave_if_gone(index, key)

    def _read(self, index: SearchIndex, info: SessionInfo) -> tuple[list[Passage], str]:
        """The turns of a session that the index lacks, and the first question. Raises as `TurnReader`."""
        known = index.indexed(key := self.reader.key(info))
        is_apart = known is not None and known.created == info.created and known.whole is None
        return self.reader.passages(info, index.turns(key) if is_apart else set())

    def _enter(
        self, index: SearchIndex, info: SessionInfo, passages: list[Passage], question: str
    ) -> None:
        """Enter turns of a session; all anew if what the index has is one passage that ends elsewhere, or
        turns where there can only be one passage."""
        known = index.indexed(key := self.reader.key(info))
        whole = next((each.turn for each in passages if each.is_whole), None)
        anew = known is not None and known.whole != whole
        if index.add(key, info.created, passages, question, anew=anew):
            self._scrub_at = 0.0
        self._leave_if_gone(index, key)

    def _try_to_enter(self, index: SearchIndex, info: SessionInfo) -> None:
        """Enter a session; one that cannot be read is left out."""
        try:
            passages, question = self._read(index, info)
        except NotFound:
            return  # it was deleted just now
        except TowerdError as error:
            log.info(
                "a session cannot be searched",
                extra={"session": info.id, "error": error.message},
            )
            return
        self._enter(index, info, passages, question)

    def _compare(self, index: SearchIndex) -> Iterator[bool]:
        """Enter what the catalog has more than the index, a session in each step, and remove what
        it has no more."""
        index.repair()
        seen: set[SessionKey] = set()
        after = 0
        while page := self._store.session_page(after, PAGE):
            for row, info in page:
                after = row
                seen.add(self.reader.key(info))
                if not self._is_current(index, info):
                    self._try_to_enter(index, info)
                    yield True
        gone = [key for key in index.keys() if key not in seen and not self._exists(key)]
        if index.forget(gone):
            self._scrub_at = 0.0

    def _is_current(self, index: SearchIndex, info: SessionInfo) -> bool:
        """Whether all of a session is entered, as far as it can be read here: the daemon of another
        tokenizer knows the turns that are one passage here, and enters them one by one."""
        known = index.indexed(self.reader.key(info))
        if known is None or known.created != info.created:
            return False
        if known.whole is None:
            return known.n_turns >= info.n_turns
        return bool(info.tokenizer) and known.whole == leaf_of(info)

    def _leave_if_gone(self, index: SearchIndex, key: SessionKey) -> None:
        """Remove a session that was deleted while it was being entered."""
        if not self._exists(key) and index.forget([key]):
            self._scrub_at = 0.0

    def _exists(self, key: SessionKey) -> bool:
        try:
            return self.reader.info(key).scope == key.scope
        except NotFound:
            return False


def open_search(store: Store, coding: Coding, wanted: bool) -> Search:
    """The search of a store. If it is not wanted, its file is deleted; if that cannot be opened, this
    is logged and nothing is found."""
    root = store.state.directory.root
    index = None
    try:
        if wanted:
            index = SearchIndex(root / FILE_NAME, store.writes, store.vault)
        else:
            remove_index(root)
    except TowerdError as error:
        log.warning("conversations cannot be searched", extra={"error": error.message})
    return Search(store, coding, index)
