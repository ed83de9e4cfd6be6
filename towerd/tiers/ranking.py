"""Ranking: the eviction policies of the hot and the warm tier, informed of what the daemon does.

A policy learns of a request once, when its turn is recorded: at the time of the request's arrival
its whole path was used, both the rows of the tier and the *expected* ones (rows that will be
exported from the live context, copied from disk, or written to it). A policy therefore sees the same
as in a replay of the recorded trace: one visit per request, however late the rows follow.

What stands above and below a node the policies read from the tree itself. Uses, and rows that come
and go, reach them in one order, that of the store's lock. The thread that holds the lock records an
*event* and never waits for a policy. The events are played back in order, outside that lock, before
any question is answered. A policy therefore never meets a segment's rows before the split that
created it, or after its removal.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
import time
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from towerd.policy import Key, Policy, make_policy
from towerd.policy.base import Learning, ReuseForecaster
from towerd.policy.workflow_tree import NextStep, WorkflowTree
from towerd.store import Node, SegmentFile, Store
from towerd.store.tree.tree import Listener, PrefixTree

log = logging.getLogger(__name__)

META_KEY = "learned"
LEARNED_VERSION = 2
"""Of what policies learned: 2 has the steps of workflows by tenant."""
BYTES_MAX = 1 << 20
"""Maximum size of the text; larger ones are not kept."""
_JSON_BYTES_MAX = 16 << 20
_DIGEST_BYTES = 16
_KEEP_S = 600.0


class NodeTree:
    """A `policy.Tree` whose keys are node ids. It is read without the store's lock, by whoever
    holds the ranking's: a single look at a node never meets half a change."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.removed: dict[Key, Node] = {}
        """Nodes that are gone, but not for the policies, which have still to hear of it."""

    def parent(self, key: Key) -> Key | None:
        """See Tree.parent."""
        node = self._tree.nodes.get(key) or self.removed.get(key)
        above = None if node is None else node.parent
        return None if above is None or above.parent is None else above.id

    def children(self, key: Key) -> Iterable[Key]:
        """See Tree.children."""
        node = self._tree.nodes.get(key)
        below = () if node is None else tuple(node.children)
        return (child.id for child in reversed(below))

    def file(self, key: Key) -> SegmentFile | None:
        """The file that has the node's rows."""
        node = self._tree.nodes.get(key)
        return None if node is None else node.file

    def node(self, key: Key) -> Node | None:
        """The node, if it is in the tree."""
        return self._tree.nodes.get(key)


_STEP_S = 1e-6
"""Spacing of events with the same clock time."""
_EXPECTED_S_MAX = 60.0
"""Rows that have not arrived after this time are no longer expected."""
_NO_USE_S = float("-inf")
"""The time of a split, which is not a use; the visit that follows it is."""


class TierRanking:
    """The eviction policy of one tier, told of uses and of rows that come and go. Not thread-safe;
    the ranking's lock guards it."""

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.now = float("-inf")
        """Time of the last event."""
        self._clock = clock
        self._expected: OrderedDict[Key, tuple[float, int]] = OrderedDict()
        """Node -> the time since which its rows are expected, and their bytes."""

    def __contains__(self, key: Key) -> bool:
        return key in self.policy

    def visit(
        self, path: Sequence[Key], new: Mapping[Key, tuple[int, bool]], arrived_s: float
    ) -> None:
        """A request used `path`. new: the bytes of those that were not known, and whether they are
        there or expected."""
        policy = self.policy
        now = self.now = max(arrived_s, self.now + _STEP_S)
        self.forget_expected()
        n_there = next((i for i, key in enumerate(path) if key not in policy), len(path))
        if n_there:
            policy.access(path[n_there - 1], now)
        for key in path[n_there:]:
            if key in policy:
                policy.access(key, now)
            elif key in new:
                nbytes, is_there = new[key]
                policy.insert(key, nbytes, now)
                if not is_there:
                    self._expected[key] = self._clock(), nbytes

    def split(self, lower: Key, upper: Key, nbytes: int, n_upper: int, n_lower: int) -> None:
        """`upper` took `n_upper` tokens of `lower`, which has `n_lower` left. nbytes: of its rows,
        if they are there."""
        if lower in self._expected:
            since, whole = self._expected[lower]
            nbytes = whole * n_upper // (n_upper + n_lower)
            self._expected[upper] = since, nbytes
            self._expected[lower] = since, whole - nbytes
        self.policy.split(lower, upper, nbytes, _NO_USE_S)

    def arrive(self, sizes: Sequence[tuple[Key, int]], used: float | None = None) -> None:
        """Rows are there, of these bytes. used: when they were, unless they are known; None: with
        the last event."""
        if used is None:
            used = self._clock() if self.now == float("-inf") else self.now
        for key, nbytes in sizes:
            self._expected.pop(key, None)
            if key in self.policy:
                self.policy.resize(key, nbytes)
            else:
                self.now = max(used, self.now)
                self.policy.insert(key, nbytes, self.now)

    def leave(self, key: Key) -> None:
        """The rows are gone."""
        self.policy.remove(key)
        self._expected.pop(key, None)

    def forget(self, key: Key) -> None:
        """The node is removed from the tree."""
        self.policy.forget(key)
        self._expected.pop(key, None)

    def answered(self, end: Key, now: float, stop: str) -> None:
        """See Policy.answered."""
        self.now = max(now, self.now)
        self.policy.answered(end, self.now, stop)

    def victims(
        self,
        bytes_needed: int,
        is_evictable: Callable[[Key], bool],
        frees: Callable[[Key], int] | None = None,
    ) -> list[Key]:
        """See Policy.victims. Rows that are expected stay."""
        self.forget_expected()
        expected = self._expected
        return self.policy.victims(
            bytes_needed, lambda key: key not in expected and is_evictable(key), frees
        )

    def is_expected(self, key: Key) -> bool:
        """Whether the rows have still to come."""
        return key in self._expected

    def forget_expected(self) -> None:
        """Forget the rows that did not come in time."""
        due = self._clock() - _EXPECTED_S_MAX
        while self._expected and next(iter(self._expected.values()))[0] < due:
            key, _ = self._expected.popitem(last=False)
            self.policy.remove(key)

    def check_integrity(self, there: Mapping[Key, int]) -> None:
        """AssertionError unless the policy knows these rows, with these bytes, and the expected
        ones."""
        expected = {key: nbytes for key, (_, nbytes) in self._expected.items()}
        assert not there.keys() & expected.keys(), "rows are expected and there"
        self.policy.check_integrity({**there, **expected})


class LiveRanking(TierRanking):
    """The policy of the live context. A sequence leaves it whole, so what is asked is how the ends of
    the sequences' towers stand."""

    def __init__(self, policy: Policy, clock: Callable[[], float], tree: NodeTree) -> None:
        super().__init__(policy, clock)
        self.standings: Mapping[Key, float] = {}
        """By end, see Policy.standing. It is replaced and never changed: the inference thread reads it
        without a lock."""
        self._tree = tree
        self._ends = Counter[Key]()
        """The ends of the sequences that are live."""

    def follow(self, old: Key | None, new: Key | None, size_of: Callable[[Key], int]) -> None:
        """A sequence whose tower ended with `old` has one that ends with `new`; None: it was not
        there, or is gone. size_of: the bytes of a node's rows"""
        if new is not None:
            self._ends[new] += 1
            self.arrive([(key, size_of(key)) for key in self._unsettled(new)])
        if old is not None:
            self._ends[old] -= 1
            if not self._ends[old]:
                del self._ends[old]
            self._sweep()
        if new is None:
            # its capacity is what the context holds when it evicts
            self.policy.victims(0, lambda key: False)

    def publish(self) -> None:
        """Let `standings` be how the ends stand now."""
        found = ((key, self.policy.standing(key)) for key in self._ends)
        self.standings = {key: standing for key, standing in found if standing is not None}

    def check_live(self, ends: Iterable[Key]) -> None:
        """AssertionError unless these are the ends, and the policy knows those that are in the tree."""
        assert self._ends == Counter(ends), "the ends of live towers"
        there = [key for key in self._ends if self._tree.node(key) is not None]
        assert all(key in self for key in there), "a live tower is not known to the policy"
        self.policy.check_integrity()

    def _unsettled(self, end: Key) -> list[Key]:
        """The nodes of its path that are not known to be live, from the first on."""
        path: list[Key] = []
        at: Key | None = end
        while at is not None and (at not in self or self.is_expected(at)):
            path.append(at)
            at = self._tree.parent(at)
        return path[::-1]

    def _sweep(self) -> None:
        """Remove what no sequence has. What a running request adds is expected, and stays."""
        for leaf in self.policy.leaves():
            at: Key | None = leaf
            while at is not None and at not in self._ends and not self.is_expected(at):
                above = self._tree.parent(at)
                self.leave(at)
                at = above if above is not None and self.policy.is_leaf(above) else None


class Ranking(Listener):
    """The policies of all tiers behind one lock.

    `visited` and the Listener methods are called under the store's lock, everything else by any
    thread that does not hold it."""

    def __init__(
        self,
        policy: str,
        store: Store,
        clock: Callable[[], float],
        predictor: Path | None = None,
        *,
        ranks_live: bool = False,
    ) -> None:
        """predictor: a trained predictor of workflow steps. ranks_live: whether there is a live context
        that leaves by the policy, too; by LRU it needs no ranking. Raises ConfigError."""
        self.policy = policy
        self._store = store
        self._tree = NodeTree(store.state.tree)
        self._hot, self._warm = (
            TierRanking(make_policy(policy, self._tree, predictor), clock) for _ in range(2)
        )
        self._live: LiveRanking | None = None
        if ranks_live and policy != "lru":
            ranked = make_policy(policy, self._tree, predictor)
            self._live = LiveRanking(ranked, clock, self._tree)
        self._clock = clock
        self._events: deque[Callable[[], None]] = deque()
        """Events not reported to the policies yet. Appending and taking are atomic."""
        self._lock = threading.Lock()
        self._keep_due_s = time.monotonic() + _KEEP_S
        self._recall(store.get_meta(META_KEY))

    # ---- under the store's lock -------------------------------------------------------------

    def visited(
        self,
        path: Iterable[Node],
        arrived_s: float,
        hot_bytes: Callable[[Node], int],
        warm_bytes: Callable[[Node], int],
    ) -> None:
        """A request that arrived at `arrived_s` used `path`, from the first node on. hot_bytes,
        warm_bytes: bytes that a node's rows take in each tier, now or soon; 0 if none are there or
        expected."""
        nodes = [node for node in path if not node.removed]
        if not nodes:
            return
        keys = [node.id for node in nodes]
        # the sizes of the others are known, and paths can be long
        hot = {
            node.id: (nbytes, node.hot is not None)
            for node in nodes
            if node.id not in self._hot and (nbytes := hot_bytes(node))
        }
        warm = {
            node.id: (nbytes, node.file is not None)
            for node in nodes
            if node.id not in self._warm and (nbytes := warm_bytes(node))
        }
        self._events.append(partial(self._hot.visit, keys, hot, arrived_s))
        self._events.append(partial(self._warm.visit, keys, warm, arrived_s))
        if (tier := self._live) is not None:
            live = {node.id: (self._store.bytes_of(node), False) for node in nodes}
            self._events.append(partial(tier.visit, keys, live, arrived_s))

    def split(self, lower: Node, upper: Node) -> None:
        native, n = self._store.bytes_of(upper), (upper.n, lower.n)
        hot = native if upper.hot is None else upper.hot.nbytes
        warm = self._store.state.file_bytes(upper) or native
        self._events.append(partial(self._hot.split, lower.id, upper.id, hot, *n))
        self._events.append(partial(self._warm.split, lower.id, upper.id, warm, *n))
        if self._live is not None:
            self._events.append(partial(self._live.split, lower.id, upper.id, native, *n))

    def removed(self, node: Node) -> None:
        self._tree.removed[node.id] = node
        self._events.append(partial(self._remove, node))

    def became_hot(self, nodes: Sequence[Node]) -> None:
        found = [(node.id, node.hot.nbytes) for node in nodes if node.hot is not None]
        self._events.append(partial(self._hot.arrive, found))

    def left_hot(self, node: Node) -> None:
        self._events.append(partial(self._hot.leave, node.id))

    def became_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        found = [(node.id, self._store.state.file_bytes(node)) for node in nodes]
        self._events.append(partial(self._warm.arrive, found))

    def left_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._events.append(partial(self._warm.leave, node.id))

    def found(self, nodes: Iterable[Node]) -> None:
        """These nodes exist at start."""
        there = [node for node in nodes if node.file is not None]
        for node in sorted(there, key=lambda node: (node.last_used, node.p0)):
            sizes = [(node.id, self._store.state.file_bytes(node))]
            self._events.append(partial(self._warm.arrive, sizes, node.last_used))

    # ---- the live context -------------------------------------------------------------------

    @property
    def ranks_live(self) -> bool:
        """Whether it ranks the live context."""
        return self._live is not None

    @property
    def live_standings(self) -> Mapping[Key, float]:
        """By the end of a live tower: sequences that stand lower leave first, and those below 0 are not
        expected to be used again. As of the last event; reading it waits for nothing."""
        return {} if self._live is None else self._live.standings

    def follow(self, old: Key | None, new: Key | None) -> None:
        """See LiveRanking.follow. Waits for nothing: the policy hears of it later, in order."""
        if self._live is not None and old != new:
            self._events.append(partial(self._live.follow, old, new, self._live_bytes))

    def _live_bytes(self, key: Key) -> int:
        node = self._tree.node(key)
        return 0 if node is None else self._store.bytes_of(node)

    # ---- progress of requests ---------------------------------------------------------------

    def settle(self) -> None:
        """Report all events so far to the policies."""
        with self._lock:
            self._play()
            self._publish()

    def answered(self, end: Node, now: float, stop: str) -> None:
        """The visit of `end` got its answer, which ended because of `stop`."""
        self._tell(lambda tier: tier.answered(end.id, now, stop))

    def stepped(self, end: Node, workflow: str, agent: str, base: Node | None = None) -> None:
        """The visit of `end` was a step of `agent` in `workflow`; ignored if `end` is gone by now. base: where what
        the agent's prompts begin with ends"""
        key = None if base is None else base.id
        self._tell(lambda tier: tier.policy.stepped(end.id, tier.now, workflow, agent, key), end)

    def ended(self, end: Node) -> None:
        """No request will continue from `end`."""
        self._tell(lambda tier: tier.policy.ended(end.id, tier.now))

    def workflow_ended(self, workflow: str) -> None:
        """No step of `workflow` will follow."""
        self._tell(lambda tier: tier.policy.workflow_ended(workflow, tier.now))

    def _tell(self, event: Callable[[TierRanking], None], of: Node | None = None) -> None:
        with self._lock:
            self._play()
            if of is None or self._tree.node(of.id) is not None:  # a policy would never forget it
                for tier in self._all:
                    event(tier)
            self._publish()

    # ---- decisions --------------------------------------------------------------------------

    def hot_victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """Nodes whose rows leave RAM, in order. `is_evictable` must not wait for the store."""
        with self._lock:
            self._play()
            return self._hot.victims(bytes_needed, is_evictable)

    def warm_victims(
        self, nbytes: int, is_evictable: Callable[[SegmentFile], bool], *, leave: bool = True
    ) -> list[SegmentFile]:
        """Files to delete, in order; with `leave` off, those that would be the first to go. A file
        goes with the last of the nodes that view it. `is_evictable` must not wait for the store."""
        tree, files = self._tree, list[SegmentFile]()
        left: dict[SegmentFile, int] = {}

        def is_free(key: Key) -> bool:
            file = tree.file(key)
            return file is not None and is_evictable(file)

        def frees(key: Key) -> int:
            file = tree.file(key)
            if file is None:
                return 0
            left[file] = left.get(file, len(self._store.viewers(file))) - 1
            if left[file]:
                return 0
            files.append(file)
            return file.nbytes

        with self._lock:
            self._play()
            choose = self._warm.victims if leave else self._warm.policy.lowest
            choose(nbytes, is_free, frees)
        return files

    @property
    def predicts_reuse(self) -> bool:
        """Whether the policy can name the conversations that it expects back."""
        return isinstance(self._hot.policy, ReuseForecaster)

    def wanted(self, most: int) -> list[tuple[Key, float]]:
        """See ReuseForecaster.wanted; empty for a policy that does not predict reuse."""
        with self._lock:
            self._play()
            if not isinstance(self._hot.policy, ReuseForecaster):
                return []
            return self._hot.policy.wanted(self._clock(), most)

    def next_steps(
        self, most: int, chance_min: float, leaves_out: Callable[[str, int], bool]
    ) -> list[NextStep]:
        """See WorkflowTree.next_steps; empty for a policy that knows no workflows."""
        with self._lock:
            self._play()
            policy = self._hot.policy
            if not isinstance(policy, WorkflowTree):
                return []
            return policy.next_steps(most, chance_min, leaves_out)

    def n_steps(self, workflows: Iterable[str]) -> dict[str, int]:
        """How many steps each has taken; 0 if it is over."""
        with self._lock:
            self._play()
            policy = self._hot.policy
            known = policy.n_steps if isinstance(policy, WorkflowTree) else lambda _: 0
            return {name: known(name) for name in workflows}

    def explain(self, node: Node) -> dict[str, Any]:
        """The values by which each tier's policy ranks `node`; None: it is not in that tier."""
        with self._lock:
            self._play()
            now = self._clock()
            hot, warm = (
                {**found, "expected": tier.is_expected(node.id)} if found else None
                for tier in (self._hot, self._warm)
                for found in [tier.policy.explain(node.id, now)]
            )
            return {
                "policy": self.policy,
                "hot": hot,
                "warm": warm,
                "n_hot": len(self._hot.policy),
                "n_warm": len(self._warm.policy),
            }

    # ---- over a restart ---------------------------------------------------------------------

    def learned(self) -> str | None:
        """What both policies learned, as the text that the catalog keeps; None: they do not learn."""
        with self._lock:
            found = {name: each.learned() for name, each in self._learning()}
        return pack(self.policy, found) if found else None

    def keep(self, *, now: bool) -> None:
        """Write what both policies learned to the catalog if it is due, or at once with `now`. For
        one thread. Raises DiskFull or StoreError."""
        if not now and time.monotonic() < self._keep_due_s:
            return
        self._keep_due_s = time.monotonic() + _KEEP_S
        text = self.learned()
        if text is not None:
            self._store.set_meta(META_KEY, text)

    def _recall(self, text: str | None) -> None:
        """Resume from a text that `learned` returned. Any other text is logged and ignored."""
        if text is None:
            return
        with self._lock:
            try:
                found = unpack(self.policy, text)
                for name, each in self._learning():
                    each.recall(found[name])
                if self._live is not None and isinstance(self._live.policy, Learning):
                    self._live.policy.recall(found["hot"])  # it met the same requests
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("what the policy had learned is lost", extra={"error": str(error)})

    # ---- checking ---------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """AssertionError unless the policies know exactly the content of the store, with its sizes."""
        with self._store.locked(), self._lock:
            self._play()
            nodes, file_bytes = self._store.nodes(), self._store.state.file_bytes
            self._hot.check_integrity({n.id: n.hot.nbytes for n in nodes if n.hot is not None})
            self._warm.check_integrity({n.id: file_bytes(n) for n in nodes if n.file is not None})
            assert not self._tree.removed, "removed segments are remembered"

    def check_live(self, ends: Iterable[Key]) -> None:
        """AssertionError unless the policy of the live context knows the towers with these ends."""
        with self._store.locked(), self._lock:
            self._play()
            if self._live is not None:
                self._live.check_live(ends)

    # ---- under the ranking's lock -----------------------------------------------------------

    @property
    def _all(self) -> list[TierRanking]:
        live = [] if self._live is None else [self._live]
        return [self._hot, self._warm, *live]

    def _publish(self) -> None:
        if self._live is not None:
            self._live.publish()

    def _play(self) -> None:
        while self._events:
            self._events.popleft()()

    def _remove(self, node: Node) -> None:
        for tier in self._all:
            tier.forget(node.id)
        self._tree.removed.pop(node.id, None)

    def _learning(self) -> list[tuple[str, Learning]]:
        both = (("hot", self._hot.policy), ("warm", self._warm.policy))
        return [(name, each) for name, each in both if isinstance(each, Learning)]


def pack(policy: str, learned: Mapping[str, Any]) -> str | None:
    """What policies learned as a short text: JSON, deflated, with a checksum, of which damage only
    loses what was learned. None: it would be larger than BYTES_MAX."""
    raw = zlib.compress(
        json.dumps({"policy": policy, "version": LEARNED_VERSION, **learned}).encode()
    )
    text = base64.b85encode(_digest(raw) + raw).decode()
    return text if len(text) <= BYTES_MAX else None


def unpack(policy: str, text: str) -> dict[str, Any]:
    """What was packed. Raises ValueError for anything else, and for what another policy learned."""
    if len(text) > BYTES_MAX:
        raise ValueError("it is too large")
    try:
        data = base64.b85decode(text)
        digest, raw = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if digest != _digest(raw):
            raise ValueError("its checksum is wrong")
        found = json.loads(zlib.decompressobj().decompress(raw, _JSON_BYTES_MAX))
    except (zlib.error, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    if not isinstance(found, dict) or found.pop("policy", None) != policy:
        raise ValueError("another policy learned it")
    if found.pop("version", None) != LEARNED_VERSION:
        raise ValueError("another version learned it")
    return found


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).digest()
