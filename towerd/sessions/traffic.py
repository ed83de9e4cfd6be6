"""Effects of a recorded request beyond its session: it informs the policies, advances its
workflow, and is written to the trace if the owner asked for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from towerd.errors import NotFound, TowerdError
from towerd.sessions.trace_recorder import TraceRecorder
from towerd.sessions.workflows import Tracker, Workflow, WorkflowStep
from towerd.settings.config import Config
from towerd.store import Node, Store
from towerd.store.sessions.turn import Turn
from towerd.store.sessions.workflows import Invocation, WorkflowTable
from towerd.store.tree.scope import tenant_of
from towerd.tiers.manager import Tiers

log = logging.getLogger(__name__)

_BATCH = 16
"""Steps written to the catalog at once. A crash loses fewer than this, which no predictor needs."""
T = TypeVar("T")


def open_traffic(config: Config, store: Store, tiers: Tiers) -> Traffic:
    """The traffic of one running service. Raises ConfigError if the trace cannot be written."""
    recorder = None
    if config.record is not None:
        recorder = TraceRecorder.open(config.record, store.get_meta, store.set_meta, time.time())
    return Traffic(store, tiers, recorder)


class Traffic:
    """Informs policies, workflows and the trace. Call `recorded` and `kept` off the event loop,
    after the commit."""

    def __init__(
        self,
        store: Store,
        tiers: Tiers,
        recorder: TraceRecorder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tracker = Tracker()
        self.table = WorkflowTable(store.state)
        self._tiers = tiers
        self._recorder = recorder
        self._clock = clock
        self._new: list[Invocation] = []
        """Used by the writer thread only."""
        self._lock = threading.Lock()
        self._is_open = True
        self._writer = ThreadPoolExecutor(1, "towerd-traffic")

    def close(self) -> None:
        """Write the remaining steps. Requests recorded later inform the policies only."""
        with self._lock:
            self._is_open = False
        self._writer.shutdown()
        try:
            self._write()
        except TowerdError as error:
            log.warning("a workflow was not recorded", extra={"error": str(error)})
        if self._recorder is not None:
            self._recorder.close()

    def recorded(self, turn: Turn, end: Node, session: str) -> None:
        """`turn` was committed to `session`; its tower ends with `end`."""
        now = self._clock()
        last = self._tiers.visited(end, turn.started_s, turn.n_rows)
        if turn.agent is not None or turn.workflow is not None:
            self._later(lambda: self._step(turn, end, last, session, now))
        self._tiers.ranking.answered(last, now, turn.stop)
        if self._recorder is not None and self._is_open:
            self._recorder.add(turn, session, now)

    def kept(self, end: Node, arrived_s: float) -> None:
        """A prompt without an answer was kept as reusable tokens; its tower ends with `end`. As
        after any answer, a person is expected to send the next request."""
        self._tiers.visited(end, arrived_s)
        self._tiers.ranking.answered(end, self._clock(), "end_turn")

    def running(self, scope: str | None) -> list[Workflow]:
        """The running workflows of one tenant, or of all, including every step answered so far."""
        return self._after(lambda: self.tracker.running(scope))

    def end(self, scope: str, id: str) -> Workflow:
        """A client says that its workflow is over. Raises NotFound."""
        return self._after(lambda: self._end(scope, id))

    def _end(self, scope: str, id: str) -> Workflow:
        workflow = self.tracker.end(scope, id)
        if workflow is None:
            raise NotFound(f"there is no running workflow {id!r}")
        for end in workflow.towers.values():
            if (
                tenant_of(end.scope) == scope and not end.removed
            ):  # a client cannot end segments that others share
                self._tiers.ranking.ended(end)
        self._tiers.ranking.workflow_ended(workflow.name)
        self._tiers.stepped()
        self._write()
        self.table.end(scope, id, self._clock())
        return workflow

    def stats(self) -> dict[str, Any]:
        """Gauges and counters for /metrics and /towerd/v1/stats."""
        stats: dict[str, Any] = {"workflow_" + k: v for k, v in self.tracker.stats().items()}
        if self._recorder is not None:
            stats["requests_recorded"] = self._recorder.n_requests
        return stats

    def _step(self, turn: Turn, end: Node, last: Node, session: str, now: float) -> None:
        """`last`: the node by which the policies know the visit."""
        step = WorkflowStep(
            scope=tenant_of(turn.scope),
            session=session,
            agent=turn.agent or "",
            end=end,
            prompt=np.asarray(turn.prompt),
            reply=np.asarray(turn.reply),
            arrived_s=turn.started_s,
            answered_s=now,
            stop=turn.stop,
            workflow=turn.workflow,
        )
        workflow, over = self.tracker.step(step)
        # a policy must not apply what it learns of one tenant's names to another's
        agent = f"{step.scope}\n{step.agent}"
        base = next((node for node in last.path() if node.p1 == turn.n_base), None)
        for each in over:  # one of them may have begun anew with this step
            self._tiers.ranking.workflow_ended(each.name)
        self._tiers.ranking.stepped(last, workflow.name, agent, base)
        self._tiers.stepped()
        self._new.append(
            Invocation(
                scope=step.scope,
                workflow=workflow.id,
                named=workflow.named,
                started_s=workflow.started_s,
                agent=step.agent,
                session=session,
                end=end.id,
                n_prompt=len(turn.prompt),
                n_reply=len(turn.reply),
                arrived_s=step.arrived_s,
                answered_s=now,
                stop=turn.stop,
            )
        )
        if len(self._new) >= _BATCH:
            self._write()

    def _later(self, work: Callable[[], None]) -> None:
        """Run `work` on the writer thread, in order, so that the request does not wait for it."""

        def run() -> None:
            try:
                work()
            except TowerdError as error:
                log.warning("a workflow was not recorded", extra={"error": str(error)})

        with self._lock:
            if self._is_open:
                self._writer.submit(run)

    def _after(self, work: Callable[[], T]) -> T:
        """The result of `work`, run after every step so far."""
        with self._lock:
            future = self._writer.submit(work) if self._is_open else None
        return work() if future is None else future.result()

    def _write(self) -> None:
        steps, self._new = self._new, []
        if steps:
            self.table.add(steps)
