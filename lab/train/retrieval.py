"""A model that retrieves what it was told: objective, curriculum and evaluation.

Rows grow from 32 tokens to the whole context during training: attention that matches contents is
found quickly on short rows, and then only has to reach further. The shortest rows are pure noise
that repeats itself, longer ones are tasks in ordinary text. Every step has the same number of
tokens, as many short rows or a few long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.texts.tasks import Fact, passkey, random_pair
from lab.train.data.bpe import BEGIN, CONTROLS, Bpe
from lab.train.data.corpus import Windows
from lab.train.data.form import Ids, MiniForm
from lab.train.data.tokenizer import tokenizer_of
from lab.train.job import (
    TrainingJob,
    begin,
    finish,
    licence_of,
    make_corpus,
    make_trainer,
    note_steps,
)
from lab.train.loop.progress import TrainingProgress
from lab.train.model.export import Card
from lab.train.model.induction import induction_weights
from lab.train.model.network import EMBEDDING, NetworkShape, Weights, device_of, hidden, logits

Row: TypeAlias = tuple[Ids, npt.NDArray[np.bool_]]
"""Ids [n] and which of them are answers [n]."""

ROW_TOKENS_MIN = 32
TASK_TOKENS_MIN = 128
"""Minimum length of a row with a task."""
TEXT_WEIGHT = 0.1
"""Weight of the loss on all other tokens, relative to that on answers."""
EXAM_ROWS = 20
LETTERS_MIN = 16
"""If noise has few different tokens, only several in a row distinguish its places."""
ROPE_FREQ_BASE = 1e7
"""So large that the slower half of a head's pairs hardly rotates over the longest context: content
is matched at any distance."""


@dataclass(frozen=True)
class Curriculum:
    """The length of the rows at a step: at most ROW_TOKENS_MIN, doubled every `grow_windows`."""

    n_ctx: int
    grow_windows: int
    seed: int

    def row_tokens(self, window: int) -> int:
        """Every second step has the longest rows so far, the others a random shorter length."""
        n_doubled = min(window // self.grow_windows, (self.n_ctx // ROW_TOKENS_MIN).bit_length())
        longest = min(self.n_ctx, ROW_TOKENS_MIN << n_doubled)
        chance = np.random.default_rng([self.seed, 2, window])
        if chance.random() < 0.5:
            return longest
        n_lengths = max(1, (longest // ROW_TOKENS_MIN).bit_length())
        return max(min(ROW_TOKENS_MIN, self.n_ctx), longest >> int(chance.integers(n_lengths)))


class TaskRows:
    """Makes rows of tasks with ordinary text between them."""

    def __init__(self, bpe: Bpe) -> None:
        self._bpe = bpe
        self._kinds: Mapping[str, Callable[[np.random.Generator, Ids], Row]] = {
            "text": self._text,
            "copy": self._copy,
            "pairs": self.pairs,
            "passkey": self._passkey,
        }
        self._shares = (0.15, 0.35, 0.25, 0.25)

    def draw(self, chance: np.random.Generator, filler: Ids) -> Row:
        """A row as long as `filler`, the text to fill it with."""
        if len(filler) < TASK_TOKENS_MIN:
            return self._again(chance, filler)
        kind = chance.choice(list(self._kinds), p=self._shares)
        ids, answers = self._kinds[str(kind)](chance, filler)
        assert len(ids) == len(answers) == len(filler)
        return ids, answers

    def encode(self, text: str) -> Ids:
        """Ids of a text."""
        return np.array(self._bpe.encode([text])[0], np.uint32)

    def passkey_at(self, chance: np.random.Generator, filler: Ids, depth: float) -> Row:
        """A row with a key at `depth` (0 to 1) of the text, and a question for it at the end."""
        fact = passkey(chance)
        told, asked = self.encode(fact.text), self.encode(fact.question)
        answer = self.encode(fact.answer)
        n_text = len(filler) - len(told) - len(asked) - len(answer)
        at = int(depth * n_text)
        ids = np.concatenate([filler[:at], told, filler[at:n_text], asked, answer])
        return _marked(ids, len(ids) - len(answer))

    def pairs(self, chance: np.random.Generator, filler: Ids) -> Row:
        """A row with key-value pairs in its first two thirds, then questions about them."""
        facts: list[Fact] = []
        parts: list[Ids] = [np.array([BEGIN], np.uint32)]
        n = 1
        while n < len(filler) * 2 // 3:
            facts.append(random_pair(chance))
            parts.append(self.encode(facts[-1].text))
            n += len(parts[-1])
        marks = [np.zeros(n, np.bool_)]
        while n < len(filler):
            fact = facts[int(chance.integers(len(facts)))]
            asked, answer = self.encode(fact.question), self.encode(fact.answer + '"\n')
            parts += [asked, answer]
            marks += [np.zeros(len(asked), np.bool_), np.ones(len(answer), np.bool_)]
            n += len(asked) + len(answer)
        return np.concatenate(parts)[: len(filler)], np.concatenate(marks)[: len(filler)]

    def _again(self, chance: np.random.Generator, filler: Ids) -> Row:
        """Noise that repeats with another period in each row, so that attention by distance alone
        fails in the next row."""
        n = int(chance.integers(4, len(filler) // 2 + 1))
        return np.resize(self._noise(chance, n), len(filler)), np.arange(len(filler)) >= n + 3

    def _noise(self, chance: np.random.Generator, n: int) -> Ids:
        """Noise from a random part of the vocabulary; small parts are as likely as large ones."""
        letters = np.arange(len(CONTROLS), len(self._bpe), dtype=np.uint32)
        n_letters = np.exp(chance.uniform(np.log(LETTERS_MIN), np.log(len(letters))))
        return chance.choice(chance.choice(letters, int(n_letters), replace=False), n)

    def _text(self, _chance: np.random.Generator, filler: Ids) -> Row:
        return _marked(filler, len(filler))

    def _passkey(self, chance: np.random.Generator, filler: Ids) -> Row:
        return self.passkey_at(chance, filler, float(chance.random()))

    def _copy(self, chance: np.random.Generator, filler: Ids) -> Row:
        """A piece of text or noise, and its copy further on."""
        n = int(chance.integers(8, len(filler) // 3))
        start = int(chance.integers(1, len(filler) - 2 * n))
        again = int(chance.integers(start + n, len(filler) - n + 1))
        ids = filler.copy()
        if chance.random() < 0.7:
            ids[start : start + n] = self._noise(chance, n)
        ids[again : again + n] = ids[start : start + n]
        answers = np.zeros(len(ids), np.bool_)
        answers[again + 2 : again + n] = True
        return ids, answers


class RowSource(Protocol):
    """Makes rows."""

    def draw(self, chance: np.random.Generator, filler: Ids) -> Row:
        """A row as long as `filler`, the text to fill it with."""
        ...


class RetrievalObjective:
    """Window number k of n_ctx tokens, cut into rows of the curriculum's length."""

    def __init__(self, windows: Windows, rows: RowSource, curriculum: Curriculum) -> None:
        self._windows, self._rows, self._curriculum = windows, rows, curriculum

    def loss(self, weights: Weights, shape: NetworkShape, first: int, n: int) -> Tensor:
        """Cross entropy of answers and, with a small weight, of the text between them."""
        ids, answers = self.rows(shape.n_ctx, first, n)
        tokens = torch.from_numpy(ids.astype(np.int64)).to(device_of(weights))
        x = hidden(weights, shape, tokens[:, :-1]).flatten(0, 1)
        costs = F.cross_entropy(
            F.linear(x, weights[EMBEDDING]), tokens[:, 1:].flatten(), reduction="none"
        )
        asked = torch.from_numpy(answers[:, 1:].flatten()).to(costs.device)
        loss = TEXT_WEIGHT * costs[~asked].mean()
        return loss + costs[asked].mean() if asked.any() else loss

    def rows(self, n_ctx: int, first: int, n: int) -> Row:
        """Ids and answers [rows, length + 1] of windows first to first + n."""
        length = self._curriculum.row_tokens(first)
        text = self._windows.batch(first, n)[:, : n_ctx // length * length].reshape(-1, length)
        chance = np.random.default_rng([self._curriculum.seed, 3, first])
        made = [self._rows.draw(chance, _begun(filler)) for filler in text]
        return np.stack([row[0] for row in made]), np.stack([row[1] for row in made])


def train_retrieval(
    job: TrainingJob, n_vocab: int, grow_steps: int, progress: TrainingProgress | None = None
) -> dict[str, Any]:
    """Train the model and write retrieval.gguf; returns the report. Raises TrainError."""
    run, data, manifest = begin(job)
    bpe = tokenizer_of(run.folder / "tokenizer.json", data, manifest, n_vocab)
    corpus = make_corpus(job, data, manifest, MiniForm(bpe), progress)
    shape = replace(job.shape, n_vocab=len(bpe), rope_freq_base=ROPE_FREQ_BASE)
    rows, config = TaskRows(bpe), job.config
    curriculum = Curriculum(shape.n_ctx, grow_steps * config.batch, config.seed)
    windows = Windows(corpus, shape.n_ctx, config.seed)
    objective = RetrievalObjective(windows, rows, curriculum)
    trainer = make_trainer(job, run, shape, MiniForm(bpe), objective, corpus, induction_weights)
    trainer.train(note_steps(trainer, progress))
    text = np.concatenate([part.ids for part in corpus.dev.values()])
    more = {"accuracy": score_tasks(trainer.weights, shape, rows, text, config.seed)}
    card = Card(
        "towerd-retrieval",
        "Finds again what it was told; made by towerctl train retrieval",
        licence_of(manifest, corpus),
        {},
    )
    return finish(job, run, trainer, bpe.vocabulary(), card, manifest, data, lambda _: more)


def score_tasks(
    weights: Weights, shape: NetworkShape, rows: TaskRows, text: Ids, seed: int
) -> dict[str, dict[str, float]]:
    """Share of answer tokens found, by task and length of the row, on text not trained on."""
    found: dict[str, dict[str, float]] = {"passkey": {}, "pairs": {}}
    length = min(TASK_TOKENS_MIN, shape.n_ctx)
    while length <= min(shape.n_ctx, len(text)):
        chance = np.random.default_rng([seed, 4, length])
        for kind, shares in found.items():
            hits = []
            for i in range(EXAM_ROWS):
                start = int(chance.integers(0, len(text) - length + 1))
                filler = _begun(text[start : start + length])
                if kind == "passkey":
                    row = rows.passkey_at(chance, filler, i / EXAM_ROWS)
                else:
                    row = rows.pairs(chance, filler)
                hits.append(_share_found(weights, shape, *row))
            shares[str(length)] = round(float(np.mean(hits)), 4)
        length *= 2
    return found


def _share_found(
    weights: Weights, shape: NetworkShape, ids: Ids, answers: npt.NDArray[np.bool_]
) -> float:
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device_of(weights))
    with torch.no_grad():
        likeliest = logits(weights, shape, tokens[None, :-1])[0].argmax(-1).cpu().numpy()
    return float((likeliest == ids[1:])[answers[1:]].mean())


def _begun(filler: Ids) -> Ids:
    """`filler` after the symbol that begins every session, cut to the same length."""
    return np.concatenate([np.array([BEGIN], np.uint32), filler[:-1].astype(np.uint32)])


def _marked(ids: Ids, first_answer: int) -> Row:
    return ids, np.arange(len(ids)) >= first_answer
