"""What leaves the hot and the warm tier first: their policies, fed with what the daemon does.

A policy hears of a request once, when its turn is recorded: at the time the request arrived its
whole path was used, whatever of it was hot, and whatever is about to become so (*expected*: rows
that will be exported from the live context, or copied from disk). So a policy sees what a replay
of the recorded trace sees, one visit a request, however late rows follow. The warm tier's keys
are files, and its policy hears of a visit when the file of the visit's tip is written.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towerd.policy import Key, make_policy
from towerd.policy.base import Foretelling, Learning
from towerd.store import Node, SegmentFile
from towerd.tiers.learned import pack, unpack

log = logging.getLogger(__name__)

_STEP_S = 1e-6
"""Between events that a clock gives the same time."""
_EXPECTED_S_MAX = 60.0
"""Rows that were expected and have not come for so long will not come."""
_VISITS_MAX = 4096
"""Visits that wait for a file; then the oldest goes without."""

IsEvictable = Callable[[Key], bool]


@dataclass(slots=True)
class _Visit:
    """A request that the warm tier has not heard of."""

    tip: Node
    """Not the path: it may be thousands of nodes long, and is cut until then."""
    arrived_s: float
    answered_s: float = 0.0
    stop: str | None = None
    step: tuple[str, str] | None = None


class Ranking:
    """Both policies behind one lock; every method may be called from any thread."""

    def __init__(
        self, policy: str, clock: Callable[[], float], predictor: Path | None = None
    ) -> None:
        """predictor: a trained one for workflow steps. Raises ConfigError."""
        self.policy = policy
        self._hot = make_policy(policy, predictor)
        self._warm = make_policy(policy, predictor)
        self._clock = clock
        self._lock = threading.Lock()
        self._hot_s = self._warm_s = float("-inf")
        """Time of each policy's last event."""
        self._expected: OrderedDict[Key, tuple[float, int]] = OrderedDict()
        """Node -> since when its rows are expected, and how many bytes."""
        self._splits: list[tuple[Key, Key, Key | None, int, int, int]] = []
        self._visits: OrderedDict[Key, _Visit] = OrderedDict()
        """By tip: those that wait for its file."""
        self._keys: dict[int, Key] = {}
        """Files that took the place of another one: their id -> the key of the first."""

    # ---- requests ---------------------------------------------------------------------------

    def visited(self, path: list[Node], arrived_s: float, nbytes: Callable[[Node], int]) -> None:
        """A request that arrived at `arrived_s` used `path`, from the first node on. `nbytes`:
        what a node's rows take in RAM, now or soon; 0: it has none there and gets none."""
        if not path:
            return
        with self._lock:
            known = self._n_hot(path)
        # Asked without this lock: the store's may be needed, and who holds that may wait for this.
        sizes = {node.id: nbytes(node) for node in path[known:]}
        with self._lock:
            now = self._hot_s = max(arrived_s, self._hot_s + _STEP_S)
            self._apply_splits(now)
            self._forget_expected()
            n_there = self._n_hot(path)
            if n_there:
                self._hot.access(path[n_there - 1].id, now)
            for node in path[n_there:]:
                size = sizes.get(node.id, 0)
                if node.id in self._hot:
                    self._hot.access(node.id, now)
                elif size:
                    self._hot.insert(node.id, size, now, _parent_id(node))
                    if node.hot is None:
                        self._expected[node.id] = now, size
            self._visit_warm(_Visit(path[-1], arrived_s))

    def answered(self, tip: Node, now: float, stop: str) -> None:
        """The visit of `tip` got its answer, which ended because of `stop`."""
        with self._lock:
            self._hot_s = max(now, self._hot_s)
            self._hot.answered(tip.id, self._hot_s, stop)
            visit = self._visits.get(tip.id)
            if visit is not None:
                visit.answered_s, visit.stop = now, stop
            elif tip.file is not None:
                self._warm_s = max(now, self._warm_s)
                self._warm.answered(self._key(tip.file), self._warm_s, stop)

    def stepped(self, tip: Node, workflow: str, agent: str) -> None:
        """The visit of `tip` was a step of `agent` in `workflow`."""
        with self._lock:
            self._hot.stepped(tip.id, self._hot_s, workflow, agent)
            visit = self._visits.get(tip.id)
            if visit is not None:
                visit.step = workflow, agent
            elif tip.file is not None:
                self._warm.stepped(self._key(tip.file), self._warm_s, workflow, agent)

    def ended(self, tip: Node) -> None:
        """Nobody will go on from `tip`."""
        with self._lock:
            self._hot.ended(tip.id, self._hot_s)
            if tip.file is not None:
                self._warm.ended(self._key(tip.file), self._warm_s)

    def workflow_ended(self, workflow: str) -> None:
        """No step of `workflow` will follow."""
        with self._lock:
            self._hot.workflow_ended(workflow, self._hot_s)
            self._warm.workflow_ended(workflow, self._warm_s)

    # ---- rows come, change and go -----------------------------------------------------------

    def became_hot(self, nodes: Iterable[Node]) -> None:
        """These nodes have rows in RAM now."""
        with self._lock:
            self._apply_splits(self._now_hot())
            for node in nodes:
                self._expected.pop(node.id, None)
                if node.id in self._hot:
                    self._hot.resize(node.id, _hot_bytes(node))
                else:
                    self._hot.insert(node.id, _hot_bytes(node), self._hot_s, _parent_id(node))

    def became_warm(self, file: SegmentFile) -> None:
        """A file was written."""
        with self._lock:
            waiting = [self._visits.pop(n.id) for n in list(file.nodes) if n.id in self._visits]
            for visit in waiting:
                self._deliver(visit)
            if file.nodes and self._key(file) not in self._warm:
                self._insert_warm(file, self._clock())

    def found(self, nodes: Iterable[Node]) -> None:
        """These nodes were there at start; each of their files counts as used when any of its
        nodes was."""
        used: dict[SegmentFile, float] = {}
        for node in nodes:
            if node.file is not None:
                used[node.file] = max(used.get(node.file, 0.0), node.last_used)
        with self._lock:
            for file in sorted(used, key=lambda file: used[file]):
                self._insert_warm(file, used[file])

    def replaced(self, old: SegmentFile, new: SegmentFile) -> None:
        """`new` holds what `old` held: it keeps its place."""
        with self._lock:
            key = self._keys.pop(old.id, old.id)
            if not new.nodes:  # removed since
                self._warm.remove(key)
                return
            self._keys[new.id] = key
            self._warm.resize(key, new.nbytes)

    def split(self, lower: Node, upper: Node) -> None:
        """`lower` was cut; `upper` is its beginning. Counts as part of the next visit, which is
        why it was cut."""
        with self._lock:
            self._splits.append(
                (lower.id, upper.id, _parent_id(upper), _hot_bytes(upper), upper.n, lower.n)
            )

    def left_hot(self, key: Key) -> None:
        """A node's rows left RAM, or the node is gone."""
        with self._lock:
            self._apply_splits(self._now_hot())
            self._hot.remove(key)
            self._expected.pop(key, None)
            self._visits.pop(key, None)

    def left_warm(self, key: Key, file: SegmentFile | None) -> None:
        """What had this key is gone."""
        with self._lock:
            self._warm.remove(key)
            if file is not None:
                self._keys.pop(file.id, None)

    # ---- decisions --------------------------------------------------------------------------

    def hot_victims(self, bytes_needed: int, is_evictable: IsEvictable) -> list[Key]:
        """Nodes whose rows leave RAM, in order."""
        with self._lock:
            self._apply_splits(self._now_hot())
            self._forget_expected()
            return self._hot.victims(
                bytes_needed, lambda key: key not in self._expected and is_evictable(key)
            )

    def warm_victims(self, bytes_needed: int, is_evictable: IsEvictable) -> list[Key]:
        """Files to delete, by key, in order."""
        with self._lock:
            return self._warm.victims(bytes_needed, is_evictable)

    def key_of(self, file: SegmentFile) -> Key:
        """The key that `warm_victims` has for a file."""
        with self._lock:
            return self._key(file)

    @property
    def foretells(self) -> bool:
        """Whether the policy can say what it expects back."""
        return isinstance(self._hot, Foretelling)

    def wanted(self, most: int) -> list[tuple[Key, float]]:
        """See Foretelling.wanted; nothing of a policy that does not foretell."""
        with self._lock:
            if not isinstance(self._hot, Foretelling):
                return []
            return self._hot.wanted(self._clock(), most)

    def explain(self, node: Node) -> dict[str, Any]:
        """What each tier's policy goes by for `node`; None: it is not in that tier."""
        with self._lock:
            now = self._clock()
            self._apply_splits(self._now_hot())
            hot = self._hot.explain(node.id, now)
            warm = self._warm.explain(self._key(node.file), now) if node.file is not None else {}
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
        """Go on from what `learned` gave; anything else is ignored, with a line in the log."""
        if text is None:
            return
        with self._lock:
            try:
                found = unpack(self.policy, text)
                for name, each in self._learning():
                    each.recall(found[name])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("what the policy had learned is lost", extra={"error": str(error)})

    # ---- inside -----------------------------------------------------------------------------

    def _learning(self) -> list[tuple[str, Learning]]:
        both = (("hot", self._hot), ("warm", self._warm))
        return [(name, each) for name, each in both if isinstance(each, Learning)]

    def _n_hot(self, path: list[Node]) -> int:
        """How many nodes the path begins with that the hot tier's policy has."""
        hot = self._hot
        return next((i for i, node in enumerate(path) if node.id not in hot), len(path))

    def _visit_warm(self, visit: _Visit) -> None:
        tip = visit.tip
        if tip.file is not None:
            self._deliver(visit)
            return
        self._visits[tip.id] = visit
        self._visits.move_to_end(tip.id)
        if len(self._visits) > _VISITS_MAX:
            self._deliver(self._visits.popitem(last=False)[1])

    def _deliver(self, visit: _Visit) -> None:
        """Tell the warm tier's policy of a visit, by the files that there are."""
        files = [node.file for node in visit.tip.path() if node.file is not None]
        if not files:
            return
        now = self._warm_s = max(visit.arrived_s, self._warm_s + _STEP_S)
        for file in files:
            if self._key(file) in self._warm:
                self._warm.access(self._key(file), now)
            else:
                self._insert_warm(file, now)
        tip = self._key(files[-1])
        if visit.step is not None:
            self._warm.stepped(tip, now, *visit.step)
        if visit.stop is not None:
            self._warm_s = max(visit.answered_s, now)
            self._warm.answered(tip, self._warm_s, visit.stop)

    def _insert_warm(self, file: SegmentFile, now: float) -> None:
        self._warm_s = max(now, self._warm_s)
        self._warm.insert(self._key(file), file.nbytes, self._warm_s, None)

    def _apply_splits(self, now: float) -> None:
        splits, self._splits = self._splits, []
        for lower, upper, parent, nbytes, n_upper, n_lower in splits:
            if lower not in self._hot:
                if nbytes:  # it is just becoming hot, or just being evicted
                    self._hot.insert(upper, nbytes, now, parent)
                continue
            if lower in self._expected:
                since, whole = self._expected[lower]
                nbytes = whole * n_upper // (n_upper + n_lower)
                self._expected[upper] = since, nbytes
                self._expected[lower] = since, whole - nbytes
            self._hot.split(lower, upper, nbytes, now)

    def _forget_expected(self) -> None:
        due = self._clock() - _EXPECTED_S_MAX
        while self._expected and next(iter(self._expected.values()))[0] < due:
            key, _ = self._expected.popitem(last=False)
            self._hot.remove(key)

    def _now_hot(self) -> float:
        if self._hot_s == float("-inf"):
            self._hot_s = self._clock()
        return self._hot_s

    def _key(self, file: SegmentFile) -> Key:
        return self._keys.get(file.id, file.id)


def _hot_bytes(node: Node) -> int:
    return node.hot.nbytes if node.hot is not None else 0


def _parent_id(node: Node) -> int | None:
    return node.parent.id if node.parent is not None else None
