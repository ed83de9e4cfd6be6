"""Shrinker: stores rows that have been unused for some time in the formats of their levels, after longer
disuse in transform codings, and, where space is short, those that are worth least in smaller ones at once.

The positions that a tower attends to most stay native: its first SINKS positions, and the TAIL
positions before each of its current ends (a segment that is continued loses this exemption), or as few
as calibration found to be enough.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from towerd.errors import NotFound, RowsDamaged, StoreError
from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import NATIVE
from towerd.store import Base, FormatRequest, Node, SegmentFile, Store
from towerd.store.rows.format_request import bytes_after, differs
from towerd.store.rows.recoding import CodingInterrupted
from towerd.store.segments.coded_format import is_coded
from towerd.tiers.formats.fidelity import DYNAMIC, LevelFormats
from towerd.tiers.sharing import shared_levels
from towerd.tokens import Provenance

log = logging.getLogger(__name__)

SINKS = 4
TAIL = 128
SHORT_TOKENS = 512
"""Up to this length a chat's first and last positions are native as far as calibration asks for it."""
RUN_TOKENS_MIN = 64
"""Fewer tokens get no run of their own beside one of more bits."""
SCAN_S = (0.5, 60.0)
"""Minimum and maximum time between two scans of all files."""
_RETRY_S = 60.0
BUSY_S = 0.2
"""Time until transform coding that a request interrupted is tried again."""
SQUEEZE_S = 5.0
"""Time between two looks for files to squeeze, and after one that could not be written."""
_EXAMINED_MAX = 64
"""Maximum number of files examined in one step, because other work waits for it."""


@dataclass(frozen=True, slots=True)
class NativeEnds:
    """How many of the first positions stay native, and of the last of a chat of up to SHORT_TOKENS."""

    sinks: int = SINKS
    tail: int = TAIL

    def tail_of(self, n: int) -> int:
        """The last positions that stay native of `n`."""
        return self.tail if n <= SHORT_TOKENS else TAIL


DEFAULT_ENDS = NativeEnds()


class Shrinker:
    """Finds files whose rows should be in other formats and re-encodes them, one a step.

    `step` and `wait_s` are for one thread; the rest may be called by any."""

    def __init__(
        self,
        store: Store,
        after_s: float,
        clock: Callable[[], float],
        transform_after_s: float = math.inf,
    ) -> None:
        """after_s: how long rows must be unused; transform_after_s: until they are transform-coded; `clock`
        is the store's."""
        self.n_shrunk = 0
        """Segments re-encoded so far."""
        self.n_squeezed = 0
        """Segments re-encoded in the format for where space is short."""
        self.n_transformed = 0
        """Segments that were transform-coded."""
        self.pause: Callable[[], object] = lambda: None
        """Called every few milliseconds of transform coding; raises CodingInterrupted if a request runs."""
        self.n_damaged = 0
        self._store = store
        self._after_s = after_s
        self._transform_after_s = max(after_s, transform_after_s)
        self.may_transform = transform_after_s >= 0
        self._clock = clock
        self._lock = threading.Lock()
        self._reading: Counter[int] = Counter()
        self._formats: LevelFormats | None = None
        self._ends = DEFAULT_ENDS
        self._squeezed: str | None = None
        self._transform: LevelFormats | None = None
        self.has_squeezed = False
        """Whether any file has rows in the format of `squeeze`."""
        self._enabled = False
        self._is_new = False
        """Whether the table was set since `step` or `squeeze` looked."""
        self._bases: list[Base] = []
        self._scanned_bases: list[Base] = []
        """Those of the last scan."""
        self._levels: Mapping[int, int] = {}
        """Node id -> its level, of what several conversations share."""
        self._settled: dict[int, tuple[float, int, bool]] = {}
        """File id -> last use of its segments when it needed no more work, how many of them are in
        another stored format than requested, and whether they were to be transform-coded."""
        self._queue: deque[SegmentFile] = deque()
        self._to_squeeze: deque[SegmentFile] = deque()
        self._as_small_as_can_be: dict[int, float] = {}
        """File id -> last use, of files of which `squeeze` could make nothing smaller."""
        self._squeeze_due = 0.0
        """time.monotonic() at which files to squeeze are looked for again."""
        self._rest_until = 0.0
        """time.monotonic() until which steps do nothing."""

    @property
    def formats(self) -> LevelFormats | None:
        """The current table."""
        return self._formats

    @property
    def n_kept(self) -> int:
        """Segments that stay in another stored format than the requested one."""
        with self._lock:
            return sum(n_kept for _, n_kept, _ in self._settled.values())

    def set_formats(
        self,
        formats: LevelFormats | None,
        *,
        enabled: bool,
        ends: NativeEnds = DEFAULT_ENDS,
        squeezed: str | None = None,
        transform: LevelFormats | None = None,
        ever_squeezed: Collection[str] = (),
        was_squeezed: bool = False,
    ) -> None:
        """Set the table to use from now on, the format for `squeeze`, and the transform codings;
        ever_squeezed: all smaller ones that there ever were; was_squeezed: one was used. ends: what stays
        native. If not enabled, nothing is re-encoded."""
        # Those of the levels do not tell whether anything was squeezed.
        names = {squeezed, *ever_squeezed} - set(() if formats is None else formats.names)
        runs = (run for file in self._store.files() for run in file.runs)
        has_squeezed = any(run.format in names for run in runs)
        with self._lock:
            self._formats, self._enabled, self._ends = formats, enabled, ends
            self._squeezed, self.has_squeezed = squeezed, has_squeezed or was_squeezed
            self._transform = transform
            self._is_new = True

    @contextmanager
    def reading(self, sources: Iterable[object]) -> Iterator[None]:
        """Do not re-encode the files among `sources` inside the block."""
        ids = [source.id for source in sources if isinstance(source, SegmentFile)]
        with self._lock:
            self._reading.update(ids)
        try:
            yield
        finally:
            with self._lock:
                self._reading.subtract(ids)
                self._reading += Counter()  # forget the zeros

    def wait_s(self) -> float:
        """Seconds until `step` or `squeeze` may have something to do."""
        if not self._enabled:
            return math.inf
        if self._is_new:
            return 0.0
        due = min(self._rest_until, self._squeeze_due if self._to_squeeze else math.inf)
        return max(0.0, due - time.monotonic())

    def step(self) -> SegmentFile | None:
        """Examine some files and re-encode at most one; returns the new file, if any.

        Raises DiskFull or StoreError if it cannot be written; steps then pause for a time."""
        began = time.monotonic()
        self._begin_anew()
        if not self._enabled or began < self._rest_until:
            return None
        if not self._queue:
            self._begin()
        for _ in range(min(_EXAMINED_MAX, len(self._queue))):
            file = self._queue.popleft()
            if not self._is_wanted(file):
                continue
            try:
                self._bases = (
                    self._store.bases.listing()
                )  # one may have been added since the scan began
                new = self._reencode(file, self._requested(file))
            except CodingInterrupted:
                self._queue.appendleft(file)
                self._rest_until = time.monotonic() + BUSY_S
                return None
            except Exception:  # also what nobody expected: it would come again at once
                self._queue.clear()
                self._rest_until = time.monotonic() + _RETRY_S
                raise
            if new is not None:
                # requests in progress get at least half of the time
                self._rest_until = 2 * time.monotonic() - began
                return new
        if not self._queue:
            low, high = SCAN_S
            self._rest_until = time.monotonic() + min(high, max(low, self._after_s / 4))
        return None

    def squeeze(self, least_valuable: Callable[[], Iterable[SegmentFile]]) -> SegmentFile | None:
        """Re-encode at most one file of those that are worth least, in the smaller format for
        where space is short, also if its rows are in a stored format already; returns the new
        file, if any. `least_valuable` is asked now and then. Raises as `step`."""
        began = time.monotonic()
        self._begin_anew()
        smaller = self._transform
        if smaller is None and self._squeezed is not None:
            smaller = LevelFormats((self._squeezed,))
        if not self._enabled or smaller is None or began < self._squeeze_due:
            return None
        if not self._to_squeeze:
            files = list(least_valuable())
            self._to_squeeze.extend(file for file in files if not self._is_settled(file))
        self._squeeze_due = began + SQUEEZE_S
        self._bases = self._store.bases.listing()
        for _ in range(min(_EXAMINED_MAX, len(self._to_squeeze))):
            file = self._to_squeeze.popleft()
            used = self._last_used(file)
            if self._clock() - used < self._after_s or self._reading[file.id]:
                continue
            if any(node.pinned for node in self._store.viewers(file)):
                continue  # since it was queued
            requests = self._format_requests(file, smaller, again=BY_NAME)
            n_after = bytes_after(file, requests, self._store.state.row_identity.layout)
            if not self._store.writes.allows("reencoded", n_after):
                continue
            if not self._store.disk.has_spare(n_after):
                continue
            try:
                new = self._reencode(file, requests)
            except CodingInterrupted:
                self._to_squeeze.appendleft(file)
                self._squeeze_due = time.monotonic() + BUSY_S
                return None
            if new is None:
                self._as_small_as_can_be[file.id] = used
            if new is not None:
                self.has_squeezed = self.has_squeezed or self._transform is None
                self.n_squeezed += len(self._store.viewers(new))
                # requests in progress get at least half of the time
                self._squeeze_due = 2 * time.monotonic() - began
                return new
        if self._to_squeeze:
            self._squeeze_due = began
        return None

    def _begin_anew(self) -> None:
        """If there is a new table: forget what was found of files under the one before."""
        with self._lock:
            if not self._is_new:
                return
            self._is_new, self._settled = False, {}
        self.relax()
        self._as_small_as_can_be.clear()
        self._rest_until = 0.0

    def relax(self) -> None:
        """Space is not short any more: forget what was queued for `squeeze`."""
        self._to_squeeze.clear()

    def _is_settled(self, file: SegmentFile) -> bool:
        """Whether nothing could be gained of a file when it was looked at, and it was not used
        since."""
        return self._as_small_as_can_be.get(file.id) == self._last_used(file)

    def _begin(self) -> None:
        """Queue every file that was used since the last scan or may now need another format."""
        bases = self._store.bases.listing()
        with self._lock:
            if bases != self._scanned_bases:
                self._settled = {}
            self._bases, self._scanned_bases, settled = bases, bases, self._settled
        tables = [table for table in (self._formats, self._transform) if table is not None]
        if not tables and not any(base.format for base in bases):
            return
        files = self._store.files()
        with self._lock:
            for known_files in (settled, self._as_small_as_can_be):
                for gone in known_files.keys() - {file.id for file in files}:
                    del known_files[gone]
        self._queue.extend(file for file in files if self._is_unsettled(file, settled))
        if self._queue and any(len(set(table.names)) > 1 for table in tables):
            self._levels = shared_levels(self._store)

    def _is_unsettled(
        self, file: SegmentFile, settled: Mapping[int, tuple[float, int, bool]]
    ) -> bool:
        used, _, was_last = settled.get(file.id, (0.0, 0, False))
        return used != self._last_used(file) or was_last != self._is_due(file)

    def _is_due(self, file: SegmentFile) -> bool:
        """Whether a file's rows are to be transform-coded by now."""
        unused_s = self._clock() - self._last_used(file)
        return self._transform is not None and unused_s >= self._transform_after_s

    def _requested(self, file: SegmentFile) -> list[FormatRequest]:
        """What `step` wants of a file."""
        if self._is_due(file):
            return self._format_requests(file, self._transform, again=BY_NAME)
        return self._format_requests(file, self._formats)

    def _is_wanted(self, file: SegmentFile) -> bool:
        """Whether re-encoding would change anything and the file has been unused long enough."""
        used = self._last_used(file)
        if self._clock() - used < self._after_s or self._reading[file.id]:
            return False
        requests, is_due = self._requested(file), self._is_due(file)
        native = self._store.state.row_identity.layout
        n_changed, _ = differs(file, requests, native)
        if n_changed > 0 and self._store.writes.budget:
            n_after = bytes_after(file, requests, native)
            if n_after > file.nbytes - n_after:
                n_changed = 0  # it would cost more writing than it saves
            elif not self._store.writes.allows("reencoded", n_after):
                return False
        if n_changed > 0 and not self._store.disk.has_spare(bytes_after(file, requests, native)):
            return False  # for a while there are both files
        if n_changed == 0:
            n_kept = sum(differs(file, [request], native)[1] > 0 for request in requests)
            with self._lock:
                self._settled[file.id] = used, n_kept, is_due
        return n_changed > 0

    def _reencode(self, file: SegmentFile, requests: Sequence[FormatRequest]) -> SegmentFile | None:
        if differs(file, requests, self._store.state.row_identity.layout)[0] == 0:
            return None
        try:
            new = self._store.rows.reencode(file, requests, self.pause)
        except RowsDamaged as error:
            log.warning("stored rows cannot be re-encoded", extra={"error": str(error)})
            self.n_damaged += 1
            return None
        except StoreError:
            if not file.dropped:
                raise
            return None  # deleted while it was read, which needs its name where it is encrypted
        except ValueError as error:  # e.g. infinities, which no block code can hold
            log.warning("rows stay as computed", extra={"error": str(error)})
            with self._lock:
                self._settled[file.id] = self._last_used(file), 0, self._is_due(file)
            return None
        if new is not None and any(is_coded(request.format) for request in requests):
            self.n_transformed += len(self._store.viewers(new))
        elif new is not None:
            self.n_shrunk += len(self._store.viewers(new))
        return new

    def _last_used(self, file: SegmentFile) -> float:
        nodes = self._store.viewers(file)
        return max((node.last_used for node in nodes), default=math.inf)

    def _format_requests(
        self, file: SegmentFile, table: LevelFormats | None, *, again: Collection[str] = ()
    ) -> list[FormatRequest]:
        """The formats that `table` asks for, of the rows of the file's segments; again: see
        FormatRequest."""
        with self._store.locked():
            nodes = sorted(self._store.viewers(file), key=lambda node: node.p0)
            unmoved = [n for n in nodes if file.worst(n.p0, n.p1) <= Provenance.APPROXIMATE]
            return self._requests(unmoved, table, again)

    def requests_for(self, nodes: Sequence[Node]) -> list[FormatRequest]:
        """The formats in which rows of consecutive segments, which were never written, are written at
        once."""
        return self._at_once(nodes, self._formats, ())

    def coded_requests_for(self, nodes: Sequence[Node]) -> list[FormatRequest]:
        """The transform codings in which such rows are written if today's budget has no room to write them
        twice, first in block formats; none if it has, or for pinned ones, which are read too often."""
        if self._transform is None or not self._store.writes.is_nearly_spent:
            return []
        if any(node.pinned for node in nodes):
            return []
        return self._at_once(nodes, self._transform, BY_NAME)

    def _at_once(
        self, nodes: Sequence[Node], table: LevelFormats | None, again: Collection[str]
    ) -> list[FormatRequest]:
        if not self._enabled:
            return []
        with self._store.locked():
            self._bases = self._store.bases.listing()
            unmoved = [n for n in nodes if not n.removed and n.origin <= Provenance.APPROXIMATE]
            return self._requests(unmoved, table, again)

    def _requests(
        self, nodes: Sequence[Node], table: LevelFormats | None, again: Collection[str]
    ) -> list[FormatRequest]:
        """The formats that `table` asks for, of the rows of these segments without sinks and tails.
        Moved rows are not among them: they stay as they are, until exact ones replace them. What came
        to be shared is encoded once more out of the formats of deeper levels in any case, as
        calibration measures it. Under the store's lock."""
        requests = []
        for node in nodes:
            is_own = not node.pinned and node.id not in self._levels
            # What is shared, or squeezed, was measured with the default ones.
            ends = self._ends if is_own and not again else DEFAULT_ENDS
            p0, p1 = max(node.p0, ends.sinks), min(node.p1, tail_start(node, ends))
            if p0 < p1:
                requests += [
                    replace(each, again=again or each.again)
                    for each in self._requests_for(node, p0, p1, table)
                    if each.format != NATIVE
                ]
        return without_short(requests)

    def _requests_for(
        self, node: Node, p0: int, p1: int, table: LevelFormats | None
    ) -> list[FormatRequest]:
        """The format that the shallowest base covering `node` asks for of its positions [p0, p1), the
        most faithful one if several bases of that level do, or else those of its level. Unless a base
        asks, rows are encoded again out of the formats of deeper levels."""
        covering = [base for base in self._bases if node.pinned and self._covers(base, node)]
        level = min((base.level for base in covering), default=self._levels.get(node.id, DYNAMIC))
        bases = [base for base in covering if base.level == level]
        if any(base.format for base in bases):
            names = [base.format or _level_format(table, level) for base in bases]
            return [FormatRequest(p0, p1, max(names, key=_bits))]
        if table is None:
            return []
        deeper = table.names[level + 1 :]
        # What prompts share ends with the node, or they would share the next one.
        stretches = table.stretches(level, 0, node.p1)
        cut = [(max(p0, start), min(p1, stop), name) for start, stop, name in stretches]
        return [FormatRequest(*each, again=deeper) for each in cut if each[0] < each[1]]

    def _covers(self, base: Base, node: Node) -> bool:
        try:
            end = self._store.node(base.node)
        except NotFound:
            return False
        while end.parent is not None and end.p0 > node.p0:
            end = end.parent
        return end is node


def tail_start(node: Node, ends: NativeEnds = DEFAULT_ENDS) -> int:
    """The first of the last positions of any current tower through `node` that stay native: TAIL of
    long ones. If it lies beyond the node, none of its rows is in a tail. Call it while the store is
    locked."""
    start = node.p1
    stack = [node]
    while stack:
        each = stack.pop()
        if each.p1 - TAIL < start:
            if each.children:
                stack += each.children
            else:
                start = min(start, each.p1 - ends.tail_of(each.p1))
    return start


def _level_format(table: LevelFormats | None, level: int) -> str:
    return NATIVE if table is None else table.format_for(level)


def without_short(requests: Sequence[FormatRequest]) -> list[FormatRequest]:
    """`requests`, of which a few tokens between others take the format of the neighbour that takes
    more bits: planes begin at pages, so that a short run of its own takes more bytes than it saves.
    """
    runs: list[FormatRequest] = []
    for each in requests:
        last = runs[-1] if runs else None
        if last is not None and last.p1 == each.p0 and last.format == each.format:
            runs[-1] = replace(last, p1=each.p1, again=[x for x in last.again if x in each.again])
        else:
            runs.append(each)
    found = []
    for i, run in enumerate(runs):
        if run.p1 - run.p0 < RUN_TOKENS_MIN:
            beside = [runs[k] for k in (i - 1, i + 1) if 0 <= k < len(runs)]
            beside = [each for each in beside if each.p0 == run.p1 or each.p1 == run.p0]
            more = [each for each in beside if _bits(each.format) > _bits(run.format)]
            if more:
                taken = min(more, key=lambda each: _bits(each.format))
                run = replace(run, format=taken.format, again=taken.again)
        found.append(run)
    return found


def _bits(name: str) -> float:
    if is_coded(name):
        return 0.0  # fewer than any block format, and one table has codings alone
    return math.inf if name == NATIVE else BY_NAME[name].bits_per_value
