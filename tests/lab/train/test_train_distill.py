"""Distillation: the divergence by its definition, a real teacher, a student that follows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

import towerd
from lab.models.random_gguf import PRESETS, Shape, make_random_gguf
from lab.texts.chat_records import ChatRecord, Message
from lab.train.data.corpus import Corpus, Windows
from lab.train.data.manifest import read_manifest
from lab.train.data.records import read_dataset
from lab.train.errors import TrainError
from lab.train.evaluation.gain import advice, gain, held_out
from lab.train.job import Distillation, TrainingJob, distill
from lab.train.loop.schedule import Budget
from lab.train.loop.trainer import TrainConfig
from lab.train.model.network import NetworkShape, init_weights
from lab.train.objectives.distillation import DistillationObjective, divergence
from lab.train.objectives.teacher import BATCH, Teacher, TeacherForm
from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary

BUNDLED = Path(towerd.__file__).parent / "data" / "stories260K.gguf"
REPOSITORY = Path(__file__).parents[3]
N_CTX = 64


@pytest.fixture(scope="module")
def teacher() -> Iterator[Teacher]:
    with Teacher(BUNDLED, 200, n_threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("k", [1, 3, 9, 10])
def test_divergence_by_its_definition(k: int) -> None:
    """Over the k outcomes and the rest, summed by hand."""
    chance = np.random.default_rng(k)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in chance.normal(size=(2, 6, 10)))
    ids = np.argsort(-p, axis=-1)[:, :k]
    expected = 0.0
    for row in range(6):
        pairs = [(p[row, i], q[row, i]) for i in ids[row]]
        if k < 10:
            pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
        expected += sum(a * np.log(a / b) for a, b in pairs) / 6
    found = divergence(
        torch.from_numpy(np.log(q) + 3),
        torch.from_numpy(ids),
        torch.from_numpy(np.take_along_axis(p, ids, -1)),
    )
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("k", [1, 3, 9, 10])
def test_gradients_are_those_of_finite_differences(k: int) -> None:
    chance = np.random.default_rng(k)
    scores = torch.from_numpy(chance.normal(size=(2, 3, 10))).requires_grad_()
    p = torch.from_numpy(chance.normal(size=(2, 3, 10))).softmax(-1)
    ids = p.argsort(-1, descending=True)[..., :k]
    assert torch.autograd.gradcheck(lambda x: divergence(x, ids, p.gather(-1, ids)), scores)


def test_divergence_of_a_certain_student_has_gradients() -> None:
    """All mass on the teacher's k tokens: the rest underflows, but nothing becomes nan."""
    scores = torch.tensor([[200.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = divergence(scores, torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
    loss.backward()
    assert torch.isfinite(loss)
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_targets_are_the_teachers_distribution(teacher: Teacher) -> None:
    """Against an evaluation of one token after the other, across the borders of batches."""
    ids = np.array(
        teacher.begin + teacher.tokenize("Once upon a time " * 40, special=False), np.uint32
    )[: BATCH + 40]
    assert len(ids) == BATCH + 40
    found = teacher.targets(ids, 5)
    whole = teacher.targets(ids, teacher.n_vocab)
    assert found.ids.shape == found.p.shape == (len(ids), 5)
    np.testing.assert_allclose(whole.p.sum(axis=1), 1.0, rtol=1e-4)
    for place in (0, 1, BATCH - 1, BATCH, BATCH + 39):
        alone = teacher.targets(ids[: place + 1], teacher.n_vocab)
        p = np.zeros(teacher.n_vocab)
        p[alone.ids[-1]] = alone.p[-1]
        np.testing.assert_allclose(np.sort(found.p[place]), np.sort(p)[-5:], rtol=2e-2, atol=1e-5)
        np.testing.assert_allclose(p[found.ids[place]], found.p[place], rtol=2e-2, atol=1e-5)


def test_form_is_the_teachers_own_template(tmp_path: Path) -> None:
    """ChatML with its control tokens, and plain text where the template does not fit."""
    path = tmp_path / "m.gguf"
    make_random_gguf(path, Shape(1, 64, 2, 1, 64, 500, n_ctx_train=128))
    said = [Message("user", "hello <|im_end|>"), Message("assistant", "yes")]
    with Teacher(path, N_CTX) as teacher, GgufVocabulary(path) as vocabulary:
        form = TeacherForm(teacher)
        chat, log = form.encode(
            [ChatRecord("talk/1", said), ChatRecord("talk/2", [Message("bob", "<|im_end|>")])]
        )
        names = [name.decode() for name in vocabulary.names]
        text = b"".join(
            vocabulary.pieces[i] or vocabulary.names[i] for i in chat.ids.tolist()[1:]
        ).decode()
        assert names[int(chat.ids[0])] == "<s>"
        assert text.startswith("<|im_start|>user\nhello")
        assert text.endswith("<|im_start|>assistant\nyes<|im_end|>")
        assert not any(names[i] for i in log.ids.tolist()[1:])
        assert form.fingerprint != ""
    assert set(chat.marks.tolist()) == {0, 1}


def test_student_follows_its_teacher(
    tmp_path: Path, data_folder: Path, manifest_file: Path
) -> None:
    """End to end: the divergence falls, and the student loads with the teacher's tokenizer."""

    def run(steps: int) -> dict[str, object]:
        shape = NetworkShape(1, n_embd=32, n_layer=2, n_head=2, n_ff=48, n_ctx=N_CTX)
        config = TrainConfig(Budget(steps=steps), batch=4, micro_batch=4)
        out = tmp_path / str(steps)
        job = TrainingJob(
            data_folder, out, config, shape, manifest=manifest_file, eval_tokens=256, n_threads=1
        )
        return distill(job, Distillation(BUNDLED, top_k=16))

    few, many = run(2), run(60)
    assert many["divergence_nats"] < few["divergence_nats"] * 0.8  # type: ignore[operator]
    path = Path(str(many["model"]))
    with GgufVocabulary(path) as mine, GgufVocabulary(BUNDLED) as theirs:
        assert mine.pieces == theirs.pieces
        text = b"Tim has 2 dogs.\n"
        assert mine.tokenize(text).tolist() == theirs.tokenize(text).tolist()
    with Teacher(path, N_CTX) as student:
        assert student.targets(np.array([1, 5, 9], np.uint32), 3).p.shape == (3, 3)
    fields = GGUFReader(path).fields
    assert fields["tokenizer.chat_template"].contents()


def test_what_the_teacher_said_is_kept(tmp_path: Path) -> None:
    """A second objective has the same loss without a teacher, and only the windows
    that were read are cached."""
    chance = np.random.default_rng(1)
    corpus = Corpus({"talk": chance.integers(3, 500, 1000).astype(np.uint32)}, {}, {"talk": 1.0})
    windows = Windows(corpus, N_CTX, seed=1, n_windows=2)
    shape = NetworkShape(512, n_embd=16, n_layer=1, n_head=1, n_ff=16, n_ctx=N_CTX)
    weights = init_weights(shape, 1)
    with Teacher(BUNDLED, N_CTX, n_threads=1) as teacher:
        plain = DistillationObjective(windows, teacher, 8).loss(weights, shape, 0, 2)
        first = DistillationObjective(windows, teacher, 8, tmp_path).loss(weights, shape, 0, 2)
    # The teacher is closed: evaluating anything with it now would fail.
    again = DistillationObjective(windows, teacher, 8, tmp_path).loss(weights, shape, 2, 2)
    assert plain.item() == first.item() == again.item()
    assert len(list(tmp_path.iterdir())) == 2


def test_control_learns_the_text_itself(
    tmp_path: Path, data_folder: Path, manifest_file: Path
) -> None:
    """Without the teacher's distributions the loss is the cross entropy of the text."""
    shape = NetworkShape(1, n_embd=16, n_layer=1, n_head=1, n_ff=16, n_ctx=N_CTX)
    config = TrainConfig(Budget(steps=1), batch=2, micro_batch=2)
    job = TrainingJob(
        data_folder, tmp_path, config, shape, manifest=manifest_file, eval_tokens=64, n_threads=1
    )
    found = distill(job, Distillation(BUNDLED, top_k=16, n_windows=2, is_hard=True))
    # Fresh weights expect every token almost equally.
    assert found["loss"] == pytest.approx(np.log(found["n_vocab"]), rel=0.05)


def test_bad_teachers(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="no teacher"):
        Teacher(tmp_path / "none.gguf", N_CTX)
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF nonsense")
    with pytest.raises(TrainError, match="cannot load"):
        Teacher(path, N_CTX)


def test_gain_is_that_of_conversations_held_out_whole(
    data_folder: Path, manifest_file: Path, tmp_path: Path
) -> None:
    """No record of training among them; bytes as the codec's own blobs; refusals are told."""
    data = read_dataset(data_folder, read_manifest(manifest_file))
    with Teacher(BUNDLED, N_CTX, n_threads=1) as teacher:
        form = TeacherForm(teacher)
        unseen = held_out(data.dev, form, 600)
        trained = [each.ids.tolist() for of in data.train.values() for each in form.encode(of)]
    assert unseen
    assert not any(ids.tolist() in trained for ids in unseen)
    found = gain(BUNDLED, BUNDLED, unseen)
    with GgufVocabulary(BUNDLED) as vocabulary:
        codec = Codec(vocabulary, student=BUNDLED)
        sizes = [(len(Codec(vocabulary).encode(ids)), len(codec.encode(ids))) for ids in unseen]
    assert found["tokens"] == sum(map(len, unseen))
    assert found["bundled"]["bytes"] == sum(size for size, _ in sizes)
    assert found["smaller"]["bytes"] == sum(size for _, size in sizes)
    assert found["gain"] == pytest.approx(
        1 - found["student"]["bytes"] / found["bundled"]["bytes"], abs=1e-4
    )
    assert ("do not use it" in advice(found, BUNDLED)) == (found["gain"] <= 0)
    (tmp_path / "x.gguf").write_text("no model")
    assert "x.gguf cannot be loaded" in advice(gain(BUNDLED, tmp_path / "x.gguf", unseen), BUNDLED)


BESIDE_BFLOAT16 = """
import sys, numpy, torch
from pathlib import Path
from lab.train.model.network import NetworkShape, init_weights, logits
from lab.train.objectives.teacher import Teacher

shape = NetworkShape(512, n_embd=512, n_layer=1, n_head=8)
weights = init_weights(shape, 0)
ids = numpy.arange(3, 51, dtype=numpy.uint32)
with Teacher(Path(sys.argv[1]), 64) as teacher:
    before = teacher.targets(ids, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(weights, shape, torch.arange(512)[None])
    found.sum().backward()
    after = teacher.targets(ids, 3)
assert numpy.array_equal(before.ids, after.ids) and numpy.array_equal(before.p, after.p)
"""


def test_a_student_in_bfloat16_leaves_its_teacher_alone(tmp_path: Path) -> None:
    """On a CPU with AMX both use its tile registers: see lab/__init__.py."""
    path = tmp_path / "teacher.gguf"
    make_random_gguf(path, replace(PRESETS["small"], n_layer=1))
    subprocess.run([sys.executable, "-c", BESIDE_BFLOAT16, path], check=True, cwd=REPOSITORY)
