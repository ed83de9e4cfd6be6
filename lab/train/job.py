"""Training jobs, from a folder of records to a GGUF: `train_mini` and `distill`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.models.vocabulary import Vocabulary, from_gguf
from lab.train.data.bpe import Bpe
from lab.train.data.corpus import Corpus, Windows, build_corpus
from lab.train.data.form import MiniForm, TextForm
from lab.train.data.manifest import TextSource, read_manifest
from lab.train.data.records import Dataset, read_dataset
from lab.train.data.tokenizer import tokenizer_of
from lab.train.errors import TrainError
from lab.train.evaluation.gain import gain, held_out
from lab.train.loop.loss_plot import plot
from lab.train.loop.progress import Status, TrainingProgress
from lab.train.loop.run import TrainingRun
from lab.train.loop.trainer import InitWeights, TrainConfig, Trainer
from lab.train.model.export import Card, export
from lab.train.model.network import NetworkShape, init_weights
from lab.train.model.pretrained import PretrainedModel
from lab.train.objectives.distillation import DistillationObjective
from lab.train.objectives.objective import Objective, TextObjective
from lab.train.objectives.teacher import Teacher, TeacherForm

DEV_TOKENS = 4096
"""Number of tokens on which a student is compared with its teacher."""


@dataclass(frozen=True)
class TrainingJob:
    """The options that all commands share. `shape.n_vocab` is replaced by the tokenizer's size."""

    data: Path
    out: Path
    config: TrainConfig
    shape: NetworkShape
    resume: bool = False
    manifest: Path | None = None
    eval_tokens: int = 32768
    n_threads: int | None = None
    without: tuple[str, ...] = ()
    """Sources to leave out, to measure the model on their text."""


def train_mini(
    job: TrainingJob,
    n_vocab: int,
    tokenizer: Path | None = None,
    progress: TrainingProgress | None = None,
    *,
    start: Path | None = None,
    served: Path | None = None,
) -> dict[str, Any]:
    """Train the mini model and write mini.gguf; returns the report. Its tokenizer is that of the
    GGUF `tokenizer`, or a new one of `n_vocab` tokens. With `start` it begins with that GGUF's
    weights, sizes and tokenizer; context and RoPE base are those of the job. With `served`, the
    GGUF that a daemon serves, the report says what the model gains as its codec model. Raises
    TrainError."""
    given = None if start is None else PretrainedModel(start)
    run, data, manifest = begin(job)
    path = run.folder / "tokenizer.json"
    bpe: Bpe = tokenizer_of(path, data, manifest, n_vocab, start or tokenizer)
    corpus = make_corpus(job, data, manifest, MiniForm(bpe), progress)
    shape = replace(job.shape, n_vocab=len(bpe))
    fresh: InitWeights = init_weights
    if given is not None:
        rope = job.shape.rope_freq_base
        shape = replace(given.shape, n_ctx=job.shape.n_ctx, rope_freq_base=rope)
        fresh = given.weights
    objective = TextObjective(Windows(corpus, shape.n_ctx, job.config.seed))
    trainer = make_trainer(job, run, shape, MiniForm(bpe), objective, corpus, fresh)
    trainer.train(note_steps(trainer, progress))
    card = Card(
        "towerd-mini",
        "Language model of chat text, made by towerctl train mini",
        licence_of(manifest, corpus),
        {},
    )

    def measure(mini: Path) -> dict[str, Any]:
        if served is None:
            return {}
        with Teacher(served, shape.n_ctx, n_threads=job.n_threads) as model:
            unseen = held_out(data.dev, TeacherForm(model))
        return {"codec": gain(served, mini, unseen)}

    return finish(job, run, trainer, bpe.vocabulary(), card, manifest, data, measure)


@dataclass(frozen=True)
class Distillation:
    """The options of distillation. Raises TrainError."""

    teacher: Path
    top_k: int = 32
    """Likeliest tokens taken from the teacher at each place."""
    n_windows: int | None = None
    """Windows to learn from, again and again; None for all the text there is."""
    kept: Path | None = None
    """Folder for the teacher's distributions, for this and for other students."""
    is_hard: bool = False
    """Learn the text itself, as a control experiment for the value of the teacher."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise TrainError(
                f"The teacher must name at least 1 token at each place, not {self.top_k}."
            )

    def folder(self, form: TextForm, data: Dataset, n_ctx: int) -> Path | None:
        """The folder for this teacher's distributions on this text in windows of this size."""
        if self.kept is None:
            return None
        key = f"{form.fingerprint} {data.fingerprint} {n_ctx} {self.top_k}"
        folder = self.kept / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def distill(
    job: TrainingJob, distillation: Distillation, progress: TrainingProgress | None = None
) -> dict[str, Any]:
    """Train a student of a GGUF and write student.gguf; returns the report. Raises TrainError."""
    run, data, manifest = begin(job)
    teacher_path, top_k = distillation.teacher, distillation.top_k
    vocabulary = from_gguf(teacher_path)
    with Teacher(teacher_path, job.shape.n_ctx, n_threads=job.n_threads) as teacher:
        form = TeacherForm(teacher)
        corpus = make_corpus(job, data, manifest, form, progress)
        shape = replace(job.shape, n_vocab=teacher.n_vocab)
        seed = job.config.seed
        kept = distillation.folder(form, data, shape.n_ctx)
        windows = Windows(corpus, shape.n_ctx, seed, distillation.n_windows)
        objective: Objective = TextObjective(windows)
        if not distillation.is_hard:
            objective = DistillationObjective(windows, teacher, top_k, kept)
        trainer = make_trainer(job, run, shape, form, objective, corpus)
        trainer.train(note_steps(trainer, progress))
        windows = Windows(_dev_as_train(corpus), shape.n_ctx, seed)
        objective = DistillationObjective(windows, teacher, top_k, _subfolder(kept, "dev"))
        more = {"divergence_nats": round(_divergence(trainer, objective), 4)}
        unseen = held_out(data.dev, form)
    card = Card(
        f"towerd-student-{teacher_path.stem}",
        f"Student of {teacher_path.name}, made by towerctl train distill",
        "the licence of the teacher",
        {},
    )

    def measure(student: Path) -> dict[str, Any]:
        return more | {"codec": gain(teacher_path, student, unseen)}

    return finish(job, run, trainer, vocabulary, card, manifest, data, measure)


def begin(job: TrainingJob) -> tuple[TrainingRun, Dataset, dict[str, TextSource]]:
    """The run's folder, its text and its manifest. Raises TrainError."""
    if job.n_threads is not None:
        torch.set_num_threads(job.n_threads)
    manifest = read_manifest(job.manifest)
    data = read_dataset(job.data, manifest).without(job.without)
    return TrainingRun(job.out, resume=job.resume), data, manifest


def make_corpus(
    job: TrainingJob,
    data: Dataset,
    manifest: Mapping[str, TextSource],
    form: TextForm,
    progress: TrainingProgress | None,
) -> Corpus:
    """The text as ids, kept in the run's folder."""
    report = None if progress is None else progress.encoded
    return build_corpus(data, manifest, form, job.out / "corpus", progress=report)


def make_trainer(
    job: TrainingJob,
    run: TrainingRun,
    shape: NetworkShape,
    form: TextForm,
    objective: Objective,
    corpus: Corpus,
    fresh: InitWeights = init_weights,
) -> Trainer:
    """A trainer that resumes the run, or starts it from `fresh` weights."""
    learned = " without ".join([form.fingerprint, *sorted(job.without)])
    return Trainer(run, shape, learned, objective, corpus.dev, job.config, fresh)


def note_steps(trainer: Trainer, progress: TrainingProgress | None) -> Callable[[Status], None]:
    """A callback that adds every tenth step to the history and reports each step to `progress`."""

    def report(status: Status) -> None:
        if status.step % 10 == 0:
            trainer.note({"tokens_per_s": round(status.tokens_per_s)})
        if progress is not None:
            progress.learned(status)

    return report


def _subfolder(folder: Path | None, name: str) -> Path | None:
    if folder is None:
        return None
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def _dev_as_train(corpus: Corpus) -> Corpus:
    ids = {name: text.ids for name, text in corpus.dev.items()}
    return Corpus(ids, {}, {name: corpus.weights.get(name, 1.0) for name in ids})


def _divergence(trainer: Trainer, objective: Objective) -> float:
    n_windows = max(1, DEV_TOKENS // trainer.shape.n_ctx)
    with torch.no_grad():
        losses: list[float] = [
            objective.loss(trainer.weights, trainer.shape, k, 1).item() for k in range(n_windows)
        ]
    return sum(losses) / len(losses)


def licence_of(manifest: Mapping[str, TextSource], corpus: Corpus) -> str:
    """The licence of weights that were trained on this text."""
    licences = {part.strip() for n in corpus.train for part in manifest[n].licence.split(",")}
    return "Apache-2.0; trained on text under " + ", ".join(sorted(licences))


def finish(
    job: TrainingJob,
    run: TrainingRun,
    trainer: Trainer,
    vocabulary: Vocabulary,
    card: Card,
    manifest: Mapping[str, TextSource],
    data: Dataset,
    measure: Callable[[Path], Mapping[str, Any]],
) -> dict[str, Any]:
    """Evaluate, export and plot; write and return the report, with what `measure` finds for the
    GGUF."""
    bits = trainer.evaluate(job.eval_tokens).table(manifest)
    trainer.note({"dev": bits["all"]})
    shape = trainer.shape
    numbers = {"tokens": trainer.n_tokens, "steps": trainer.step, "bits_per_byte": bits["all"]}
    path = run.folder / f"{card.name.split('-')[1]}.gguf"
    export(path, trainer.weights, shape, vocabulary, replace(card, numbers=numbers))
    plot(run.rows(), run.folder / "loss.png", f"{card.name}: {trainer.n_tokens / 1e6:.1f} M tokens")
    report = {
        "model": str(path),
        "parameters": sum(weight.numel() for weight in trainer.weights.values()),
        "n_vocab": shape.n_vocab,
        "tokens": trainer.n_tokens,
        "steps": trainer.step,
        "minutes": round(trainer.elapsed_s / 60, 1),
        "tokens_per_s": round(trainer.n_tokens / max(trainer.elapsed_s, 1e-9)),
        "loss": round(trainer.smooth_loss, 4),
        "bits_per_byte": bits,
        "sources": {
            name: {"origin": of.origin, "licence": of.licence}
            for name, of in manifest.items()
            if name in data.train
        },
        "data": data.digests,
        **measure(path),
    }
    part = run.folder / ".report.json.part"
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, run.folder / "report.json")
    return report
