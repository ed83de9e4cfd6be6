"""Workflows and their invocations in the catalog: what predictors are trained from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towerd.store.state.state import StoreState

WORKFLOWS_MAX = 20_000
"""Maximum of all tenants; beyond it the oldest are forgotten with their invocations."""
INVOCATIONS_MAX = 500_000
_PRUNE_EVERY = 64


@dataclass(frozen=True, slots=True)
class Invocation:
    """One step of a workflow. Times in Unix seconds, lengths in tokens."""

    scope: str
    workflow: str
    named: bool
    """Whether the client named the workflow."""
    started_s: float
    """When its workflow began; tells apart workflows that had the same name."""
    agent: str
    session: str
    end: int
    """The id of the last segment of its tower."""
    n_prompt: int
    n_reply: int
    arrived_s: float
    answered_s: float
    stop: str


class WorkflowTable:
    """The workflows of the open tokenizer. Every method is one durable transaction."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._n_batches = 0

    def add(self, steps: Sequence[Invocation]) -> None:
        """Enter steps and their new workflows."""
        with self._state.lock, self._state.catalog.transaction():
            for step in steps:
                self._state.catalog.insert(
                    "invocations",
                    workflow=self._enter(step),
                    agent=step.agent,
                    session=step.session,
                    tip=step.end,
                    n_prompt=step.n_prompt,
                    n_reply=step.n_reply,
                    arrived=step.arrived_s,
                    answered=step.answered_s,
                    stop=step.stop,
                )
            if self._n_batches % _PRUNE_EVERY == 0:
                self._prune()
            self._n_batches += 1

    def end(self, scope: str, id: str, now: float) -> None:
        """Record the end of a workflow."""
        with self._state.lock, self._state.catalog.transaction():
            self._state.catalog.run(
                "UPDATE workflows SET ended = ? WHERE tokenizer = ? AND scope = ? AND id = ?"
                " AND ended IS NULL",
                (now, self._state.identity.tokenizer, scope, id),
            )

    def history(self, scope: str | None = None) -> list[list[Invocation]]:
        """The steps of every workflow, of one tenant or of all, oldest first."""
        with self._state.lock:
            rows = self._state.catalog.rows(
                "SELECT w.pk, w.scope, w.id, w.named, w.started, i.agent, i.session, i.tip,"
                " i.n_prompt, i.n_reply, i.arrived, i.answered, i.stop"
                " FROM invocations i JOIN workflows w ON w.pk = i.workflow"
                " WHERE w.tokenizer = ? AND (? IS NULL OR w.scope = ?) ORDER BY w.pk, i.id",
                (self._state.identity.tokenizer, scope, scope),
            )
        found: dict[int, list[Invocation]] = {}
        for pk, of, id, named, *rest in rows:
            found.setdefault(pk, []).append(Invocation(of, id, bool(named), *rest))
        return list(found.values())

    def _enter(self, step: Invocation) -> int:
        mine = self._state.identity.tokenizer
        rows = self._state.catalog.rows(
            "SELECT pk FROM workflows WHERE tokenizer = ? AND scope = ? AND id = ? AND started = ?",
            (mine, step.scope, step.workflow, step.started_s),
        )
        if rows:
            return int(rows[0][0])
        return self._state.catalog.insert(
            "workflows",
            tokenizer=mine,
            scope=step.scope,
            id=step.workflow,
            started=step.started_s,
            named=step.named,
        )

    def _prune(self) -> None:
        """Forget the oldest workflows beyond both bounds."""
        run = self._state.catalog.run
        pk = self._state.identity.tokenizer
        run(
            "DELETE FROM workflows WHERE pk IN (SELECT pk FROM workflows WHERE tokenizer = ?"
            " ORDER BY pk DESC LIMIT -1 OFFSET ?)",
            (pk, WORKFLOWS_MAX),
        )
        run(
            "DELETE FROM invocations WHERE id <= (SELECT id FROM invocations ORDER BY id DESC"
            " LIMIT 1 OFFSET ?)",
            (INVOCATIONS_MAX,),
        )
