"""Recorded workflows as one text each, evaluated by a model, and its states at their steps.

A step reads `<|im_start|>agent`, a new line, its text, `<|im_end|>`. A workflow is one sequence, so
every token is evaluated once. States are taken where an agent's turn begins, which is its prompt's
last token, and at the last token of its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.predict.runs import FinishedRun
from lab.predict.states import N_STATE, Floats, LogitProjection
from lab.replay.records import lines
from lab.replay.runs import read_runs
from lab.replay.workflows import is_model
from towerd.engine.embedded.context.context import LlamaContext
from towerd.model.llama_model import LlamaModel
from towerd.model.vocab import Vocab
from towerd.settings.sources import load
from towerd.tokens import Ids

CELLS = 8192
"""Tokens of a workflow that are evaluated; the states of steps beyond them are unknown."""
TEXT_CHARS = 240
"""Characters of a step that are read: its first and its last half of them."""
WORKFLOW_CHARS = 18_000
"""Of all steps of a workflow together."""


@dataclass(frozen=True, slots=True)
class SaidStep:
    """A step. text: what is read of it; is_model: whether a model said it."""

    agent: str
    text: str
    is_model: bool


@dataclass(frozen=True, slots=True)
class StepStates:
    """float32 [steps of a model, N_STATE]: at the last token of each prompt and of each answer,
    zeros where unknown."""

    prompt: Floats
    answer: Floats


def transcripts(path: Path) -> Iterator[tuple[FinishedRun, list[SaidStep]]]:
    """Every workflow of a file in the common format that has steps of a model. Raises
    TraceError."""
    runs = iter(read_runs(path))
    for record in lines(path):
        steps = record.records("steps")
        n_chars = min(TEXT_CHARS, WORKFLOW_CHARS // len(steps))
        said = [
            SaidStep(agent, _cut(step.text("text", ""), n_chars), is_model(agent))
            for step in steps
            for agent in (step.text("agent"),)
        ]
        if any(each.is_model for each in said):
            yield next(runs), said


def _cut(text: str, n: int) -> str:
    return text if len(text) <= n else f"{text[: n // 2]}\n...\n{text[len(text) - n // 2 :]}"


class TranscriptReader:
    """A model with a context of its own. n_tokens: evaluated so far."""

    def __init__(self, path: Path) -> None:
        config = load({"model": str(path)})
        self.n_tokens = 0
        self._model = LlamaModel(path, config)
        self._context = LlamaContext(self._model, config, n_cells=CELLS, n_seqs=1)
        self._vocab = Vocab(self._model.ptr)
        self._projection = LogitProjection(self._context.n_vocab)

    def close(self) -> None:
        self._context.close()
        self._model.close()

    def states(self, said: Sequence[SaidStep]) -> StepStates:
        """The states of a workflow."""
        ids = [self._vocab.bos_id] if self._vocab.add_bos else []
        at: list[tuple[int, int]] = []
        for step in said:
            ids += self._tokens(f"<|im_start|>{step.agent}\n", special=True)
            begin = len(ids) - 1
            ids += self._tokens(step.text, special=False)
            if step.is_model:
                at.append((begin, len(ids) - 1))
            ids += self._tokens("<|im_end|>\n", special=True)
        asked = np.unique(np.array(at))
        found = self._evaluate(np.array(ids[:CELLS], np.int32), asked[asked < CELLS])
        unknown = np.zeros(N_STATE, np.float32)
        prompt, answer = (
            np.stack([found.get(place, unknown) for place in places])
            for places in zip(*at, strict=True)
        )
        return StepStates(prompt, answer)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        found: list[int] = self._vocab.tokenize(text, False, special).tolist()
        return found

    def _evaluate(self, ids: Ids, asked: Ids) -> dict[int, Floats]:
        """The state at each of the places `asked`."""
        context, n_batch = self._context, len(self._context.batch.token)
        found: dict[int, Floats] = {}
        context.seq_rm(0)
        self.n_tokens += len(ids)
        for p in range(0, len(ids), n_batch):
            part = ids[p : p + n_batch]
            here = asked[(asked >= p) & (asked < p + n_batch)] - p
            context.batch.add(part, p, 0, logits_last=False)
            context.batch.logits[here] = 1
            context.decode()
            for i in here.tolist():
                found[p + i] = self._projection.state(context.logits(i))
        return found
