"""foresight: keeps what is expected back soonest relative to its size, guarded by LRU.

Every leaf is ranked by the Gittins index of its last visit (see `predict.returns`). Forecasts
can be wrong for a workload, so a shadow cache of the same capacity, which holds nothing but
sizes, runs the other strategy on the same events: LRU while the real cache uses forecasts, and
forecasts while it uses LRU. When the shadow has hit more bytes lately, they swap strategies. The
real cache begins with LRU. Under either strategy, what workflows share stays longer than what each of them
has for itself.

What did not help: more turns, finer lengths and a prior of 40 visits instead of 10 (all within
0.02 of the gap). Chats without end signals stay below 0.1 of the gap at 5 %: which chats return
is predictable there, but when is not, and above 5 % LRU's order is as good.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from itertools import islice
from typing import Any

from towerd.policy.base import LRU, Entry, Evictable, Frees, Key, Policy, Rank, Tree
from towerd.policy.predict.base import Predictor, Share, survival
from towerd.policy.predict.fallback import Fallback
from towerd.policy.predict.markov import Markov
from towerd.policy.predict.returns import EDGES_S, bin_of
from towerd.policy.predict.tenants import TenantPredictors
from towerd.policy.visits import Visit, Visits
from towerd.policy.workflow_tree import WorkflowTree

_RERANK_EVERY = 16
"""Visits after which all leaves are ranked again: indices change as time passes. This is done
after the text of the next answer has been sent, or at the next visit if no answers are reported."""
_WANTED_AMONG = 1024
_MEMORY = 0.998
"""Decay of the past at each request in the comparison of the two strategies."""
_HEIRS_MAX = 16
"""Visits remembered for a key after the descendants that they ended with were evicted."""
_ABOVE_END = 1.0
_SHARED = 1e7
"""Added to the rank of what workflows share: more than any uses per second."""
_RUNNING_S, _RUNNING_STEPS = 120.0, 8.0
"""A workflow runs, in this respect, as long as its last step is so many seconds or mean steps ago."""
_BIN_ENDS_S = tuple(edge - 1e-3 for edge in (*EDGES_S[1:], float("inf")))
"""The idle time up to which a bin is certain to hold, whatever rounding does."""
_MARGIN = 0.002
"""Share of the bytes by which the shadow must lead before the real cache swaps strategies."""


class ReturnRanking(WorkflowTree):
    """Ranks by expected return alone. Several caches can share one record of visits, and a predictor,
    which learns from the events of one of them."""

    teaches = False

    def __init__(self, tree: Tree, visits: Visits, predictor: Predictor) -> None:
        super().__init__(tree, predictor)
        self.visits = visits

    def _rank(self, entry: Entry) -> Rank:
        """The sum of the values of the visits that may return to it, and of newcomers. What workflows
        share comes behind all that they do not."""
        above = self._above_private(entry)
        if not above and self._is_over(entry):
            return -1.0, entry.used
        worth = self._step_value(entry.key)
        if worth is None:
            index, now = self.visits.index, self._now
            worth = index(entry.visit, now)
            for visit in _other_visits(entry) if entry.inherited_visits else ():
                worth += index(visit, now)
        if entry.seq > 1:
            worth += (entry.seq - 1) / max(1.0, self._now - entry.born)
        return above + worth, entry.used

    def _above_private(self, entry: Entry) -> float:
        """_SHARED for what several running workflows use, and for kept bases: the next workflow will need them
        though none does now. Else 0."""
        if self.is_kept_base(entry.key):
            return _SHARED
        users = self.users.get(entry.key, ())
        since_s = self._now - max(_RUNNING_S, _RUNNING_STEPS * self.step_s)
        return _SHARED if sum(self.runs[each].stepped_s >= since_s for each in users) > 1 else 0.0

    def _is_over(self, entry: Entry) -> bool:
        """Whether no reuse is expected: its last visit ended a conversation, or all workflows
        that used it are over, no other conversation began here, and no agent's prompts begin with it."""
        if entry.seq > 1 or self.is_kept_base(entry.key):
            return False
        is_end = entry.visit.ended and entry.weight != _ABOVE_END
        return is_end or self.is_retired(entry.key)

    def _rank_each(self, entries: list[Entry]) -> list[Entry]:
        """See Policy._rank_each. Most leaves depend on their last visit alone: their ranks
        are computed here, at a fraction of the cost of `_rank`, and hold while their idle time
        stays in the same bin. Visits without an index are scored in one batch: one by one costs
        much more."""
        now, users, over = self._now, self.users, self._n_over
        stale = [
            e for e in entries if e.until_s <= now or e.visit.table is not e.table or e.visit.ended
        ]
        plain, others, new = list[Entry](), list[Entry](), list[Visit]()
        for entry in stale:
            visit, key = entry.visit, entry.key
            if (
                visit.ended
                or entry.inherited_visits
                or entry.seq > 1
                or key in users
                or key in over
            ):
                others.append(entry)
                new += self._unscored(entry)
                continue
            plain.append(entry)
            if visit.table is None:
                new.append(visit)
        if new:
            self.visits.score(list(dict.fromkeys(new)))
        for entry in plain:
            visit, table = entry.visit, entry.visit.table
            at = bin_of(now - visit.since_s)
            entry.ranked, entry.table = (table[at], entry.used), table
            entry.until_s = visit.since_s + _BIN_ENDS_S[at]
        for entry in others:
            entry.ranked, entry.until_s = self._rank(entry), float("-inf")
        return stale

    def _unscored(self, entry: Entry) -> list[Visit]:
        """Those of its visits that `_rank` will need and that have no index yet."""
        if entry.visit.table is not None and not entry.inherited_visits or self._is_over(entry):
            return []
        if self._step_value(entry.key) is not None:
            return []
        return [v for v in (entry.visit, *_other_visits(entry)) if v.table is None]

    def _step_value(self, key: Key) -> float | None:
        """Uses per second expected from the next steps of its workflows; None: no forecast."""
        users = self.users.get(key)
        if not users:
            return None
        worth: float | None = None
        for workflow, agents in users.items():
            forecast = self.runs[workflow].forecast
            if not forecast:
                return None
            best = chance = 0.0
            for k, (alive, step) in enumerate(zip(survival(forecast), forecast, strict=True)):
                chance += alive * sum(step.get(agent, 0.0) for agent in agents)
                best = max(best, chance / (k + 1))
            worth = (worth or 0.0) + best / max(1e-3, self.step_s)
        return worth

    def _inherit(self, parent: Entry, child: Entry) -> None:
        """Visits that would return to the child will return to its parent."""
        new: list[Visit] = [*child.inherited_visits] if child.inherited_visits else []
        if child.visit is not parent.visit:
            new.append(child.visit)
        if child.used >= parent.used:
            is_end = child.visit.ended_from == child.key
            parent.weight = _ABOVE_END if is_end else child.weight
        super()._inherit(parent, child)
        if not new:
            return
        mine = parent.inherited_visits or []
        mine += [v for v in new if not v.is_back and not v.ended and v not in mine]
        if len(mine) > _HEIRS_MAX:
            mine = [v for v in mine if not v.is_back and not v.ended][-_HEIRS_MAX:]
        parent.inherited_visits = mine or None

    def count_newcomer(self, keys: list[Key]) -> None:
        """A new conversation began on these keys."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.seq, entry.until_s = entry.seq + 1, float("-inf")

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        entry.visit, entry.weight = self.visits.current, 0.0

    def rerank(self, now: float) -> None:
        """Rank every leaf as of `now`."""
        self._tick(now)
        self._push_leaves()

    def refresh(self, key: Key, now: float) -> None:
        """Rank one key again after its visit has changed."""
        self._tick(now)
        if key in self._entries:
            self._push(key)


class Foresight(ReturnRanking):
    """The policy. `trusts`: whether it uses forecasts now, or LRU."""

    teaches = True

    def __init__(self, tree: Tree, predictor: Predictor | None = None) -> None:
        super().__init__(tree, Visits(), predictor or TenantPredictors(_counting))
        self.trusts = False
        """False at first: the model knows nothing yet, and forecasts must prove themselves."""
        self._shadow: Policy = self._forecast_shadow()
        self._lead = 0.0
        """Bytes that the real cache hit and the shadow missed, less the reverse; decayed."""
        self._seen = 0.0
        self._n_visits = 0
        self._is_rerank_due = False
        self._found: list[Key] = []
        self._room: int | None = None
        """Bytes left in the tier after the last eviction; None: there was none."""

    def _rank(self, entry: Entry) -> Rank:
        if self.trusts:
            return super()._rank(entry)
        above = self._above_private(entry)
        return (-1.0 if not above and self._is_over(entry) else above), entry.used

    def _rank_each(self, entries: list[Entry]) -> list[Entry]:
        if self.trusts:
            return super()._rank_each(entries)
        return Policy._rank_each(self, entries)

    def _use(self, key: Key) -> None:
        """Walk the whole path: a conversation may continue from any key on it."""
        entries, now = self._entries, self._now
        if now > self.visits.current.start_s:
            self._begin_visit()
        visit = self.visits.current
        path: list[Entry] = []
        at: Key | None = key
        while at is not None:
            entry = entries.get(at)
            if entry is None or entry.used >= now:
                break
            path.append(entry)
            at = self.tree.parent(at)
        self._compare(path)
        self._found += [entry.key for entry in path if entry.used > float("-inf")]
        away = self.visits.away
        for entry in path:
            visit.nbytes += entry.nbytes
            entry.used, entry.visit, entry.weight = now, visit, 0.0
            if entry.key in away:
                self.visits.returned(entry.key, now)
        if key in entries:
            self.visits.set_end(key)
            self._push(key)

    def _compare(self, path: list[Entry]) -> None:
        """Count what the real cache and the shadow hit of this path (from the lowest key up), then
        insert it into the shadow."""
        shadow = self._shadow
        missing: list[Entry] = []
        for entry in path:
            self._seen += entry.nbytes
            is_hit = entry.used > float("-inf")
            if entry.key in shadow:
                if not is_hit:
                    self._lead -= entry.nbytes
                continue
            missing.append(entry)
            if is_hit:
                self._lead += entry.nbytes
        if path and len(missing) < len(path):
            shadow.access(path[len(missing)].key, self._now)
        for entry in reversed(missing):
            shadow.insert(entry.key, entry.nbytes, self._now)

    def _on_remove(self, entry: Entry) -> None:
        super()._on_remove(entry)
        if self._room is None:
            self._shadow.remove(entry.key)

    def forget(self, key: Key) -> None:
        """See Policy.forget. The shadow will never hit it."""
        super().forget(key)
        self._shadow.forget(key)

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """See Policy.split. An evicted key may still be in the shadow, and may come back."""
        nbytes = self.size_of(lower)
        if nbytes is None:
            nbytes = self._shadow.size_of(lower)
        if nbytes is not None:
            self.visits.split(lower, upper, upper_is_more=2 * upper_nbytes >= nbytes)
        self._shadow.split(lower, upper, upper_nbytes, now)
        super().split(lower, upper, upper_nbytes, now)

    def answered(self, key: Key, now: float, stop: str) -> None:
        self.visits.answered(key, now, stop)
        self._refresh_both(key, now)
        if self._is_rerank_due:
            self._rerank_both(now)
            self._rank_leaves()

    def ended(self, key: Key, now: float) -> None:
        entry = self._entries.get(key)
        if entry is not None and key in self._leaves:
            self.visits.ended(key)
        elif entry is not None:
            entry.visit.ended, entry.visit.ended_from = True, key
        self._refresh_both(key, now)

    def stepped(
        self, key: Key, now: float, workflow: str, agent: str, base: Key | None = None
    ) -> None:
        super().stepped(key, now, workflow, agent, base)
        self._shadow.stepped(key, now, workflow, agent, base)

    def workflow_ended(self, workflow: str, now: float) -> None:
        super().workflow_ended(workflow, now)
        self._shadow.workflow_ended(workflow, now)

    def resize(self, key: Key, nbytes: int) -> None:
        super().resize(key, nbytes)
        self._shadow.resize(key, nbytes)

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        """See Policy.explain. `trusts`: whether forecasts are used, or LRU."""
        found = super().explain(key, now)
        if found:
            visit = self._entries[key].visit
            found |= {
                "trusts": self.trusts,
                "returns_per_s": self.visits.index(visit, now),
                "turn": visit.turn,
                "stop": visit.stop,
                "away_s": max(0.0, now - visit.start_s),
                "ended": visit.ended,
            }
        return found

    def check_integrity(self, known: Mapping[Key, int] | None = None) -> None:
        """See Policy.check_integrity. Checks the shadow, too."""
        super().check_integrity(known)
        self._shadow.check_integrity()
        for key, visit in self.visits.away.items():
            assert visit.end == key, f"a visit waits for {key}, its end is {visit.end}"

    def learned(self) -> Mapping[str, Any]:
        """See Learning.learned. `trusts` is not part of it: forecasts must prove themselves
        again after a restart."""
        return {"visits": self.visits.learned(), "steps": super().learned()}

    def recall(self, learned: Mapping[str, Any]) -> None:
        super().recall(learned["steps"])
        self.visits.recall(learned["visits"])

    def wanted(self, now: float, most: int) -> list[tuple[Key, float]]:
        """See ReuseForecaster.wanted. Considers the most recent conversations only."""
        if not self.trusts:
            return []
        last = islice(reversed(self.visits.away.values()), _WANTED_AMONG)
        ranked = [(self.visits.index(visit, now), visit.end) for visit in last if not visit.ended]
        best = nlargest(most, [(value, end) for value, end in ranked if end is not None])
        return [(end, value) for value, end in best if value > 0.0]

    def victims(self, bytes_needed: int, is_evictable: Evictable, frees: Frees = None) -> list[Key]:
        """See Policy.victims. Sets the capacity of the shadow."""
        self._room = max(0, self.nbytes - max(0, bytes_needed))
        return super().victims(bytes_needed, is_evictable, frees)

    def _begin_visit(self) -> None:
        """Before a new visit uses anything: shrink the shadow, and use the better strategy."""
        if self._room is not None:
            for key in self._shadow.victims(self._shadow.nbytes - self._room, _always):
                self._shadow.remove(key)
        if not self.visits.current.turn:
            self.count_newcomer(self._found)
            if isinstance(self._shadow, ReturnRanking):
                self._shadow.count_newcomer(self._found)
        self._found = []
        self.visits.begin(self._now)
        self._lead *= _MEMORY
        self._seen *= _MEMORY
        self._n_visits += 1
        if self._is_rerank_due:
            self._rerank_both(self._now)
        if self._lead < -_MARGIN * self._seen:
            self._swap_strategies()
        elif self._n_visits % _RERANK_EVERY == 0:
            self._is_rerank_due = True

    def _swap_strategies(self) -> None:
        """Swap strategies. The shadow starts from what the real cache holds, so that both start
        equal; the counts in favour of each strategy are kept."""
        self._shadow = self._forecast_shadow() if self.trusts else LRU(self.tree)
        self._shadow.copy_from(self)
        self.trusts = not self.trusts
        self._lead = -self._lead
        self.rerank(self._now)

    def _rerank_both(self, now: float) -> None:
        self._is_rerank_due = False
        self.rerank(now)
        if isinstance(self._shadow, ReturnRanking):
            self._shadow.rerank(now)

    def _forecast_shadow(self) -> ReturnRanking:
        return ReturnRanking(self.tree, self.visits, self.predictor)

    def _refresh_both(self, key: Key, now: float) -> None:
        self.refresh(key, now)
        if isinstance(self._shadow, ReturnRanking):
            self._shadow.refresh(key, now)


def _other_visits(entry: Entry) -> list[Visit]:
    """Visits other than the last one that may return to it."""
    last = entry.visit
    return [
        v for v in entry.inherited_visits or () if v is not last and not v.is_back and not v.ended
    ]


def _counting(share: Share) -> Predictor:
    return Fallback([Markov(share=share)], share)


def _always(_: Key) -> bool:
    return True
