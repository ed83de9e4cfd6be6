"""Ranking: the eviction policies of the hot and the warm tier, informed of what the daemon does.

A policy learns of a request once, when its turn is recorded: at the time of the request's arrival
its whole path was used, both the hot rows and the *expected* ones (rows that will be exported from
the live context, or copied from disk). A policy therefore sees the same as in a replay of the
recorded trace: one visit per request, however late the rows follow. The warm tier's keys stand for
files, and its policy learns of a visit when the file of the visit's tip is written.

Changes and uses of segments reach the policies in one order, that of the store's lock. The thread
that holds the lock records an *event* with everything it says about the tree, and never waits for a
policy. The events are played back in order, outside that lock, before any question is answered. A
policy therefore never meets a segment before the split that created it, or after its removal.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from towerd.policy import Key, make_policy
from towerd.policy.base import Learning, ReuseForecaster
from towerd.store import Node, SegmentFile, Store
from towerd.store.listener import Listener
from towerd.tiers.learned import pack, unpack

log = logging.getLogger(__name__)

_STEP_S = 1e-6
"""Spacing of events with the same clock time."""
_EXPECTED_S_MAX = 60.0
"""Rows that have not arrived after this time are no longer expected."""
_VISITS_MAX = 4096
"""Maximum number of visits waiting for a file; beyond it the oldest is forgotten."""
_NO_USE_S = float("-inf")
"""The time of a split, which is not a use; the visit that follows it is."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """A segment's rows in RAM, present or expected."""

    key: Key
    parent: Key | None
    nbytes: int
    are_there: bool


@dataclass(slots=True)
class _Visit:
    """A request that has not been reported to the warm tier yet."""

    arrived_s: float
    answered_s: float = 0.0
    stop: str | None = None
    step: tuple[str, str] | None = None


class Ranking(Listener):
    """Both policies behind one lock.

    `visited` and the Listener methods are called under the store's lock, everything else by any
    thread that does not hold it."""

    def __init__(
        self,
        policy: str,
        clock: Callable[[], float],
        predictor: Path | None = None,
        token_bytes: int = 1,
    ) -> None:
        """predictor: a trained predictor of workflow steps. token_bytes: bytes of a token's native
        rows. Raises ConfigError."""
        self.policy = policy
        self._hot = make_policy(policy, predictor)
        self._warm = make_policy(policy, predictor)
        self._clock = clock
        self._token_bytes = token_bytes
        self._events: deque[Callable[[], None]] = deque()
        """Events not reported to the policies yet. Appending and taking are atomic."""
        self._lock = threading.Lock()
        self._hot_s = self._warm_s = float("-inf")
        """Time of each policy's last event."""
        self._expected: OrderedDict[Key, tuple[float, int]] = OrderedDict()
        """Node -> the time since which its rows are expected, and their bytes."""
        self._visits: OrderedDict[Key, _Visit] = OrderedDict()
        """Tip -> the visit that waits for its file."""
        self._keys: dict[SegmentFile, Key] = {}
        """A file that replaces another one takes over its key."""
        self._files: dict[Key, SegmentFile] = {}
        self._next_key = count(-1, -1)
        """Of files that were last used by one request, the lowest key leaves first: it falls, so
        that this is the one written last, the end of a conversation and not its beginning."""

    # ---- under the store's lock -------------------------------------------------------------

    def visited(
        self, path: Iterable[Node], arrived_s: float, nbytes: Callable[[Node], int]
    ) -> None:
        """A request that arrived at `arrived_s` used `path`, from the first node on. `nbytes`:
        bytes that a node's rows take in RAM, now or soon; 0 if none are there or expected."""
        nodes = [node for node in path if not node.removed]
        if not nodes:
            return
        new = {
            node.id: _Rows(node.id, _parent_id(node), nbytes(node), node.hot is not None)
            for node in nodes
            if node.id not in self._hot  # its size is already known, and paths can be long
        }
        files = None if nodes[-1].file is None else _files_of(nodes)
        keys = [node.id for node in nodes]
        self._events.append(partial(self._visit, keys, new, _Visit(arrived_s), files))

    def split(self, lower: Node, upper: Node) -> None:
        """See Listener.split."""
        hot, n = upper.hot, (upper.n, lower.n)
        nbytes = upper.n * self._token_bytes if hot is None else hot.nbytes
        self._events.append(partial(self._split, lower.id, upper.id, nbytes, *n))

    def removed(self, node: Node) -> None:
        """See Listener.removed."""
        self._events.append(partial(self._remove, node.id))

    def became_hot(self, nodes: Sequence[Node]) -> None:
        """See Listener.became_hot. Not called for prefetched rows."""
        found = [_Rows(n.id, _parent_id(n), n.hot.nbytes, True) for n in nodes if n.hot is not None]
        self._events.append(partial(self._heat, found))

    def left_hot(self, node: Node) -> None:
        """See Listener.left_hot."""
        self._events.append(partial(self._cool, node.id))

    def became_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        """See Listener.became_warm."""
        path = max(nodes, key=lambda node: node.p1).path()
        ends = [(node.id, i) for i, node in enumerate(path, 1) if node.file is file]
        files = [node.file for node in path]
        self._events.append(partial(self._write, file, ends, files))

    def left_warm(self, file: SegmentFile) -> None:
        """See Listener.left_warm."""
        self._events.append(partial(self._drop, file, file.successor))

    def found(self, nodes: Iterable[Node]) -> None:
        """These nodes exist at start. Each file counts as used at the last use of its nodes."""
        used: dict[SegmentFile, float] = {}
        for node in nodes:
            if node.file is not None:
                used[node.file] = max(used.get(node.file, 0.0), node.last_used)
        for file in sorted(used, key=lambda file: used[file]):
            self._events.append(partial(self._insert_warm, file, used[file]))

    # ---- progress of requests ---------------------------------------------------------------

    def settle(self) -> None:
        """Report all events so far to the policies."""
        with self._lock:
            self._play()

    def answered(self, tip: Node, now: float, stop: str) -> None:
        """The visit of `tip` got its answer, which ended because of `stop`."""
        self._events.append(partial(self._answer, tip.id, tip.file, now, stop))
        self.settle()

    def stepped(self, tip: Node, workflow: str, agent: str) -> None:
        """The visit of `tip` was a step of `agent` in `workflow`."""
        self._events.append(partial(self._step, tip.id, tip.file, (workflow, agent)))
        self.settle()

    def ended(self, tip: Node) -> None:
        """No request will continue from `tip`."""
        self._events.append(partial(self._end, tip.id, tip.file))
        self.settle()

    def workflow_ended(self, workflow: str) -> None:
        """No step of `workflow` will follow."""
        self._events.append(partial(self._end_workflow, workflow))
        self.settle()

    # ---- decisions --------------------------------------------------------------------------

    def hot_victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """Nodes whose rows leave RAM, in order. `is_evictable` must not wait for the store."""
        with self._lock:
            self._play()
            self._forget_expected()
            return self._hot.victims(
                bytes_needed, lambda key: key not in self._expected and is_evictable(key)
            )

    def warm_victims(
        self, bytes_needed: int, is_evictable: Callable[[SegmentFile], bool]
    ) -> list[SegmentFile]:
        """Files to delete, in order. `is_evictable` must not wait for the store."""
        with self._lock:
            self._play()
            keys = self._warm.victims(bytes_needed, lambda key: is_evictable(self._files[key]))
            return [self._files[key] for key in keys]

    def warm_lowest(
        self, nbytes: int, is_evictable: Callable[[SegmentFile], bool]
    ) -> list[SegmentFile]:
        """The files that would be the first to go, `nbytes` of them, in order. `is_evictable` must
        not wait for the store."""
        with self._lock:
            self._play()
            keys = self._warm.lowest(nbytes, lambda key: is_evictable(self._files[key]))
            return [self._files[key] for key in keys]

    @property
    def predicts_reuse(self) -> bool:
        """Whether the policy can name the conversations that it expects back."""
        return isinstance(self._hot, ReuseForecaster)

    def wanted(self, most: int) -> list[tuple[Key, float]]:
        """See ReuseForecaster.wanted; empty for a policy that does not predict reuse."""
        with self._lock:
            self._play()
            if not isinstance(self._hot, ReuseForecaster):
                return []
            return self._hot.wanted(self._clock(), most)

    def explain(self, node: Node) -> dict[str, Any]:
        """The values by which each tier's policy ranks `node`; None: it is not in that tier."""
        file = node.file
        with self._lock:
            self._play()
            now = self._clock()
            hot = self._hot.explain(node.id, now)
            key = self._keys.get(file) if file is not None else None
            warm = self._warm.explain(key, now) if key is not None else {}
            return {
                "policy": self.policy,
                "hot": {**hot, "expected": node.id in self._expected} if hot else None,
                "warm": warm or None,
                "n_hot": len(self._hot),
                "n_warm": len(self._warm),
            }

    # ---- over a restart ---------------------------------------------------------------------

    def learned(self) -> str | None:
        """What both policies learned, as text for `recall`; None: they do not learn."""
        with self._lock:
            found = {name: each.learned() for name, each in self._learning()}
        return pack(self.policy, found) if found else None

    def recall(self, text: str | None) -> None:
        """Resume from a text that `learned` returned. Any other text is logged and ignored."""
        if text is None:
            return
        with self._lock:
            try:
                found = unpack(self.policy, text)
                for name, each in self._learning():
                    each.recall(found[name])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("what the policy had learned is lost", extra={"error": str(error)})

    # ---- checking ---------------------------------------------------------------------------

    def check_integrity(self, store: Store, unused: Collection[Key] = ()) -> None:
        """AssertionError unless the policies know exactly the content of `store`, with its parents
        and sizes. `unused`: nodes whose rows were not reported to any policy."""
        with store.locked(), self._lock:
            self._play()
            nodes = {node.id: node for node in store.nodes()}
            hot = {
                key: (_parent_id(node), node.hot.nbytes)
                for key, node in nodes.items()
                if node.hot is not None and key not in unused
            }
            for key, (_, nbytes) in self._expected.items():
                assert key in nodes, f"rows of the removed segment {key} are expected"
                assert key not in hot, f"rows of the segment {key} are expected and there"
                hot[key] = _parent_id(nodes[key]), nbytes
            self._hot.check_integrity(hot)
            assert self._keys.keys() == set(store.files()), "other files are known"
            assert self._files == {key: file for file, key in self._keys.items()}
            self._warm.check_integrity({k: (None, f.nbytes) for k, f in self._files.items()})
            assert self._visits.keys() <= nodes.keys(), "visits wait for files of removed segments"

    # ---- events, under the ranking's lock ---------------------------------------------------

    def _play(self) -> None:
        while self._events:
            self._events.popleft()()

    def _visit(
        self,
        keys: list[Key],
        new: dict[Key, _Rows],
        visit: _Visit,
        files: list[SegmentFile] | None,
    ) -> None:
        """`files`: the files of the path, if its tip has one."""
        hot = self._hot
        now = self._hot_s = max(visit.arrived_s, self._hot_s + _STEP_S)
        self._forget_expected()
        n_there = next((i for i, key in enumerate(keys) if key not in hot), len(keys))
        if n_there:
            hot.access(keys[n_there - 1], now)
        for key in keys[n_there:]:
            if key in hot:
                hot.access(key, now)
            elif (rows := new.get(key)) is not None and rows.nbytes:
                hot.insert(key, rows.nbytes, now, rows.parent)
                if not rows.are_there:
                    self._expected[key] = self._clock(), rows.nbytes
        if files is not None:
            self._deliver(visit, files)
            return
        self._visits[keys[-1]] = visit
        self._visits.move_to_end(keys[-1])
        if len(self._visits) > _VISITS_MAX:
            self._visits.popitem(last=False)

    def _split(self, lower: Key, upper: Key, nbytes: int, n_upper: int, n_lower: int) -> None:
        if lower in self._expected:
            since, whole = self._expected[lower]
            nbytes = whole * n_upper // (n_upper + n_lower)
            self._expected[upper] = since, nbytes
            self._expected[lower] = since, whole - nbytes
        self._hot.split(lower, upper, nbytes, _NO_USE_S)

    def _remove(self, key: Key) -> None:
        self._cool(key)
        self._visits.pop(key, None)

    def _heat(self, found: list[_Rows]) -> None:
        for rows in found:
            self._expected.pop(rows.key, None)
            if rows.key in self._hot:
                self._hot.resize(rows.key, rows.nbytes)
            else:
                self._hot.insert(rows.key, rows.nbytes, self._now_hot(), rows.parent)

    def _cool(self, key: Key) -> None:
        self._hot.remove(key)
        self._expected.pop(key, None)

    def _write(
        self, file: SegmentFile, ends: list[tuple[Key, int]], files: list[SegmentFile | None]
    ) -> None:
        """`files`: the file of each node on the path to the last node that views the new file.
        `ends`: each node that views it, and the number of nodes on its path."""
        for key, n in ends:
            visit = self._visits.pop(key, None)
            if visit is not None:
                self._deliver(visit, _distinct(files[:n]))
        if file not in self._keys:
            self._insert_warm(file, self._clock())

    def _drop(self, file: SegmentFile, successor: SegmentFile | None) -> None:
        key = self._keys.pop(file, None)
        if key is None:
            return
        if successor is None or successor in self._keys:
            del self._files[key]
            self._warm.remove(key)
        else:
            self._keys[successor], self._files[key] = key, successor
            self._warm.resize(key, successor.nbytes)

    def _answer(self, tip: Key, file: SegmentFile | None, now: float, stop: str) -> None:
        self._hot_s = max(now, self._hot_s)
        self._hot.answered(tip, self._hot_s, stop)
        visit = self._visits.get(tip)
        if visit is not None:
            visit.answered_s, visit.stop = now, stop
        elif file in self._keys:
            self._warm_s = max(now, self._warm_s)
            self._warm.answered(self._keys[file], self._warm_s, stop)

    def _step(self, tip: Key, file: SegmentFile | None, step: tuple[str, str]) -> None:
        self._hot.stepped(tip, self._hot_s, *step)
        visit = self._visits.get(tip)
        if visit is not None:
            visit.step = step
        elif file in self._keys:
            self._warm.stepped(self._keys[file], self._warm_s, *step)

    def _end(self, tip: Key, file: SegmentFile | None) -> None:
        self._hot.ended(tip, self._hot_s)
        if file in self._keys:
            self._warm.ended(self._keys[file], self._warm_s)

    def _end_workflow(self, workflow: str) -> None:
        self._hot.workflow_ended(workflow, self._hot_s)
        self._warm.workflow_ended(workflow, self._warm_s)

    # ---- inside -----------------------------------------------------------------------------

    def _learning(self) -> list[tuple[str, Learning]]:
        both = (("hot", self._hot), ("warm", self._warm))
        return [(name, each) for name, each in both if isinstance(each, Learning)]

    def _deliver(self, visit: _Visit, files: list[SegmentFile]) -> None:
        """Report a visit that used these files to the warm tier's policy."""
        now = self._warm_s = max(visit.arrived_s, self._warm_s + _STEP_S)
        for file in files:
            if file in self._keys:
                self._warm.access(self._keys[file], now)
            else:
                self._insert_warm(file, now)
        tip = self._keys[files[-1]]
        if visit.step is not None:
            self._warm.stepped(tip, now, *visit.step)
        if visit.stop is not None:
            self._warm_s = max(visit.answered_s, now)
            self._warm.answered(tip, self._warm_s, visit.stop)

    def _insert_warm(self, file: SegmentFile, now: float) -> None:
        self._warm_s = max(now, self._warm_s)
        key = self._keys[file] = next(self._next_key)
        self._files[key] = file
        self._warm.insert(key, file.nbytes, self._warm_s, None)

    def _forget_expected(self) -> None:
        due = self._clock() - _EXPECTED_S_MAX
        while self._expected and next(iter(self._expected.values()))[0] < due:
            key, _ = self._expected.popitem(last=False)
            self._hot.remove(key)

    def _now_hot(self) -> float:
        if self._hot_s == float("-inf"):
            self._hot_s = self._clock()
        return self._hot_s


def _parent_id(node: Node) -> int | None:
    return node.parent.id if node.parent is not None else None


def _files_of(path: Iterable[Node]) -> list[SegmentFile]:
    return _distinct(node.file for node in path)


def _distinct(files: Iterable[SegmentFile | None]) -> list[SegmentFile]:
    return list(dict.fromkeys(file for file in files if file is not None))
