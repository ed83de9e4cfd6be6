"""The part of `towerctl lab bench policy` about workflows that nobody names: how often the daemon's tracker
finds the workflow that a new session belongs to.

Recorded runs are replayed side by side as the chat requests that their agents would send: a system prompt
of the agent, then all that was said so far. A session, one agent's chat within a run, *joins* if the tracker
takes its first request for a step of a workflow that is known; it *should* join unless it is the first of
its run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.replay.records import lines
from lab.replay.workflows import is_model
from towerd.codec.vocabulary import GgufVocabulary
from towerd.model.llama_model import init_backend
from towerd.models.bundled import default_model
from towerd.sessions.workflows import Tracker, WorkflowStep
from towerd.store.tree.node import Node
from towerd.tokens import Ids

_SIDE_BY_SIDE = 16
_SYSTEM = "You are {agent}, one of the agents of {app}. Do your part of the task, then hand over."


@dataclass(slots=True)
class Recognition:
    """Sessions that joined a workflow, those of them that joined their own, and those that should."""

    n_joined: int = 0
    n_right: int = 0
    n_should: int = 0

    @property
    def precision(self) -> float:
        return self.n_right / self.n_joined if self.n_joined else 1.0

    @property
    def recall(self) -> float:
        return self.n_right / self.n_should if self.n_should else 1.0


def recognition(path: Path) -> Recognition:
    """Of the runs in a file, `_SIDE_BY_SIDE` at a time. Raises TraceError."""
    init_backend()  # its log becomes ours
    with GgufVocabulary(default_model()) as vocabulary:
        waiting = [_requests(vocabulary, record) for record in _records(path)]
        found, tracker, node = Recognition(), Tracker(), Node(1, None, "local", 0, b"")
        owner: dict[str, int] = {}
        own: dict[int, str] = {}
        sessions: set[tuple[int, str]] = set()
        rng, running, now = np.random.default_rng(0), list[int](), 0.0
        coming = iter(range(len(waiting)))
        while True:
            while len(running) < _SIDE_BY_SIDE and (run := next(coming, None)) is not None:
                running.append(run)
            if not running:
                return found
            run = running[int(rng.integers(len(running)))]
            request = next(waiting[run], None)
            if request is None:
                running.remove(run)
                continue
            agent, prompt, reply = request
            now += 1.0
            step = WorkflowStep("", f"{run}-{agent}", agent, node, prompt, reply, now, now, "")
            workflow, _ = tracker.step(step)
            if (run, agent) not in sessions:
                sessions.add((run, agent))
                found.n_should += run in own
                found.n_joined += workflow.id in owner
                found.n_right += run in own and owner.get(workflow.id) == run
            owner.setdefault(workflow.id, run)
            own.setdefault(run, workflow.id)


def _records(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(app, who said what) of each run."""
    for record in lines(path):
        steps = record.records("steps")
        yield record.text("app"), [(s.text("agent"), s.text("text", "")) for s in steps]


def _requests(
    vocabulary: GgufVocabulary, run: tuple[str, list[tuple[str, str]]]
) -> Iterator[tuple[str, Ids, Ids]]:
    """(agent, prompt, answer) of each step of a model. What is said first is the task, whoever the record
    says said it."""
    app, said = run
    history: list[tuple[str, Ids]] = []
    for n, (agent, text) in enumerate(said):
        ids = vocabulary.tokenize(text.encode())
        if n and is_model(agent):
            system = _SYSTEM.format(agent=agent, app=app)
            marks = [vocabulary.tokenize(f"{mark}\n".encode()) for mark in ("assistant", "user")]
            parts = [vocabulary.tokenize(f"system\n{system}\n".encode())]
            for by, words in history:
                parts += [marks[by != agent], words]
            yield agent, np.concatenate([*parts, marks[0]]), ids
        history.append((agent, ids))
