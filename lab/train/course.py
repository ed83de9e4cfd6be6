"""A whole course of training: `train_mini` and `distill`, from a folder of records to a GGUF."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.train.bpe import Bpe
from lab.train.corpus import Corpus, Windows, build_corpus
from lab.train.distillation import TeacherLesson
from lab.train.errors import TrainError
from lab.train.export import Card, export
from lab.train.form import Form, MiniForm
from lab.train.lesson import Lesson, TextLesson
from lab.train.loss_plot import plot
from lab.train.manifest import Source, read_manifest
from lab.train.mini import tokenizer_of
from lab.train.network import NetworkShape, init_weights
from lab.train.progress import Progress, Status
from lab.train.records import Dataset, read_dataset
from lab.train.run import Run
from lab.train.start import Start
from lab.train.teacher import Teacher, TeacherForm
from lab.train.trainer import Fresh, TrainConfig, Trainer
from towerd.models.vocabulary import Vocabulary, from_gguf

DEV_TOKENS = 4096
"""On which a student is compared with its teacher."""


@dataclass(frozen=True)
class Course:
    """What both commands are told. `shape.n_vocab` is replaced by the tokenizer's size."""

    data: Path
    out: Path
    config: TrainConfig
    shape: NetworkShape
    resume: bool = False
    manifest: Path | None = None
    eval_tokens: int = 32768
    n_threads: int | None = None


def train_mini(
    course: Course,
    n_vocab: int,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
    *,
    start: Path | None = None,
) -> dict[str, Any]:
    """Train the mini model and write mini.gguf; returns the report. Its tokenizer is that of the
    GGUF `tokenizer`, or a new one of `n_vocab` tokens. With `start` it begins with that GGUF's
    weights, sizes and tokenizer; context and RoPE base are the course's. Raises TrainError."""
    given = None if start is None else Start(start)
    run, data, manifest = begin(course)
    path = run.folder / "tokenizer.json"
    bpe: Bpe = tokenizer_of(path, data, manifest, n_vocab, start or tokenizer)
    corpus = make_corpus(course, data, manifest, MiniForm(bpe), progress)
    shape = replace(course.shape, n_vocab=len(bpe))
    fresh: Fresh = init_weights
    if given is not None:
        rope = course.shape.rope_freq_base
        shape = replace(given.shape, n_ctx=course.shape.n_ctx, rope_freq_base=rope)
        fresh = given.weights
    lesson = TextLesson(Windows(corpus, shape.n_ctx, course.config.seed))
    trainer = make_trainer(course, run, shape, MiniForm(bpe), lesson, corpus, fresh)
    trainer.train(note_steps(trainer, progress))
    card = Card(
        "towerd-mini",
        "Language model of chat text, made by towerctl train mini",
        licence_of(manifest, corpus),
        {},
    )
    return finish(course, run, trainer, bpe.vocabulary(), card, manifest, data, {})


@dataclass(frozen=True)
class Teaching:
    """What a teacher's student is told besides. Raises TrainError."""

    teacher: Path
    top_k: int = 32
    """Likeliest tokens taken from the teacher at each place."""
    n_windows: int | None = None
    """Windows to learn from, again and again; None for all the text there is."""
    kept: Path | None = None
    """Folder for what the teacher said, for this and for other students."""
    is_hard: bool = False
    """Learn the text itself, as a control of what the teacher is worth."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise TrainError(
                f"The teacher must name at least 1 token at each place, not {self.top_k}."
            )

    def folder(self, form: Form, data: Dataset, n_ctx: int) -> Path | None:
        """Where this teacher's words on this text, in windows of this size, are kept."""
        if self.kept is None:
            return None
        key = f"{form.fingerprint} {data.fingerprint} {n_ctx} {self.top_k}"
        folder = self.kept / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def distill(course: Course, teaching: Teaching, progress: Progress | None = None) -> dict[str, Any]:
    """Train a student of a GGUF and write student.gguf; returns the report. Raises TrainError."""
    run, data, manifest = begin(course)
    teacher_path, top_k = teaching.teacher, teaching.top_k
    vocabulary = from_gguf(teacher_path)
    with Teacher(teacher_path, course.shape.n_ctx, n_threads=course.n_threads) as teacher:
        form = TeacherForm(teacher)
        corpus = make_corpus(course, data, manifest, form, progress)
        shape = replace(course.shape, n_vocab=teacher.n_vocab)
        seed = course.config.seed
        kept = teaching.folder(form, data, shape.n_ctx)
        windows = Windows(corpus, shape.n_ctx, seed, teaching.n_windows)
        lesson: Lesson = TextLesson(windows)
        if not teaching.is_hard:
            lesson = TeacherLesson(windows, teacher, top_k, kept)
        trainer = make_trainer(course, run, shape, form, lesson, corpus)
        trainer.train(note_steps(trainer, progress))
        windows = Windows(_dev_as_train(corpus), shape.n_ctx, seed)
        exam = TeacherLesson(windows, teacher, top_k, _subfolder(kept, "dev"))
        more = {"divergence_nats": round(_divergence(trainer, exam), 4)}
    card = Card(
        f"towerd-student-{teacher_path.stem}",
        f"Student of {teacher_path.name}, made by towerctl train distill",
        "the licence of the teacher",
        {},
    )
    return finish(course, run, trainer, vocabulary, card, manifest, data, more)


def begin(course: Course) -> tuple[Run, Dataset, dict[str, Source]]:
    """The run's folder, its text and its manifest. Raises TrainError."""
    if course.n_threads is not None:
        torch.set_num_threads(course.n_threads)
    manifest = read_manifest(course.manifest)
    data = read_dataset(course.data, manifest)
    return Run(course.out, resume=course.resume), data, manifest


def make_corpus(
    course: Course,
    data: Dataset,
    manifest: Mapping[str, Source],
    form: Form,
    progress: Progress | None,
) -> Corpus:
    """The text as ids, kept in the run's folder."""
    report = None if progress is None else progress.encoded
    return build_corpus(data, manifest, form, course.out / "corpus", progress=report)


def make_trainer(
    course: Course,
    run: Run,
    shape: NetworkShape,
    form: Form,
    lesson: Lesson,
    corpus: Corpus,
    fresh: Fresh = init_weights,
) -> Trainer:
    """A trainer that goes on with the run, or starts it from `fresh` weights."""
    return Trainer(run, shape, form.fingerprint, lesson, corpus.dev, course.config, fresh)


def note_steps(trainer: Trainer, progress: Progress | None) -> Callable[[Status], None]:
    """Every tenth step becomes a line of history."""

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


def _divergence(trainer: Trainer, exam: Lesson) -> float:
    n_windows = max(1, DEV_TOKENS // trainer.shape.n_ctx)
    with torch.no_grad():
        losses: list[float] = [
            exam.loss(trainer.weights, trainer.shape, k, 1).item() for k in range(n_windows)
        ]
    return sum(losses) / len(losses)


def licence_of(manifest: Mapping[str, Source], corpus: Corpus) -> str:
    """Of weights that were trained on this text."""
    licences = {part.strip() for n in corpus.train for part in manifest[n].licence.split(",")}
    return "Apache-2.0; trained on text under " + ", ".join(sorted(licences))


def finish(
    course: Course,
    run: Run,
    trainer: Trainer,
    vocabulary: Vocabulary,
    card: Card,
    manifest: Mapping[str, Source],
    data: Dataset,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Evaluate, export, plot, report."""
    bits = trainer.evaluate(course.eval_tokens).table(manifest)
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
        "sources": {n: {"origin": s.origin, "licence": s.licence} for n, s in manifest.items()},
        "data": data.digests,
        **more,
    }
    part = run.folder / ".report.json.part"
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, run.folder / "report.json")
    return report
