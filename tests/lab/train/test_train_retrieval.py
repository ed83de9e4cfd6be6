"""The model that retrieves: its tasks, its curriculum, that it learns, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from lab.texts.tasks import passkey, random_pair
from lab.train.data.bpe import BEGIN, Bpe, train_bpe
from lab.train.data.corpus import Corpus, Windows
from lab.train.data.form import Ids
from lab.train.loop.optimizer import Optimizer
from lab.train.model.induction import induction_weights
from lab.train.model.network import EMBEDDING, NetworkShape, init_weights, logits
from lab.train.retrieval import Curriculum, RetrievalObjective, Row, TaskRows
from towerd.cli.main import towerctl
from towerd.codec.vocabulary import GgufVocabulary


@pytest.fixture(scope="module")
def bpe() -> Bpe:
    return train_bpe(["the pass key is in the tower and the tower is in the store"] * 20, 300)


def test_a_fact_is_asked_for_in_its_own_words() -> None:
    """What stands before the answer in the text is what stands before it in the question."""
    chance = np.random.default_rng(1)
    for make in (passkey, random_pair):
        for _ in range(20):
            fact = make(chance)
            assert fact.question + fact.answer in fact.text


@pytest.mark.parametrize("length", [32, 65, 128, 300])
def test_rows_are_what_they_claim(bpe: Bpe, length: int) -> None:
    """As long as asked for, and everything marked as an answer stood in the row before."""
    rows, n_marked = TaskRows(bpe), 0
    for seed in range(40):
        chance = np.random.default_rng(seed)
        filler = np.full(length, 50, np.uint32)
        filler[0] = BEGIN
        ids, answers = rows.draw(chance, filler)
        assert ids.shape == answers.shape == (length,)
        assert length < 128 or ids[0] == BEGIN
        text = ids.tolist()
        for at in np.flatnonzero(answers):
            pair = text[at - 1 : at + 1]
            assert any(text[i : i + 2] == pair for i in range(at - 1))
        n_marked += int(answers.sum())
    assert n_marked > 40 * 5


def test_a_key_is_told_where_it_should_be(bpe: Bpe) -> None:
    rows = TaskRows(bpe)
    filler = np.full(400, 60, np.uint32)
    for depth in (0.0, 0.5, 1.0):
        ids, answers = rows.passkey_at(np.random.default_rng(2), filler, depth)
        told = int(np.flatnonzero(ids != 60)[0])
        n_rest = int((ids == 60).sum())
        assert abs(told - depth * n_rest) <= 1
        assert answers[-5:].all()
        assert answers.sum() == 5


def test_rows_grow_and_stay_in_bounds() -> None:
    curriculum = Curriculum(n_ctx=2048, grow_windows=50, seed=3)
    lengths = [curriculum.row_tokens(k) for k in range(600)]
    assert lengths[:50] == [32] * 50
    for k, length in enumerate(lengths):
        assert 32 <= length <= min(2048, 32 << (k // 50))
        assert length & (length - 1) == 0
    assert set(lengths[300:]) == {32, 64, 128, 256, 512, 1024, 2048}


def windows(n_vocab: int, n_ctx: int) -> Windows:
    ids = np.random.default_rng(0).integers(16, n_vocab, 20 * n_ctx).astype(np.uint32)
    return Windows(Corpus({"text": ids}, {}, {"text": 1.0}), n_ctx, 1)


def test_a_few_steps_give_the_same_bits_again(bpe: Bpe) -> None:
    shape = NetworkShape(len(bpe), n_embd=16, n_layer=1, n_head=1, n_ff=16, n_ctx=256)

    def losses() -> list[float]:
        objective = RetrievalObjective(windows(len(bpe), 256), TaskRows(bpe), Curriculum(256, 1, 5))
        weights = init_weights(shape, 1)
        optimizer, found = Optimizer(weights), []
        for window in range(3):
            loss = objective.loss(weights, shape, window, 1)
            torch.autograd.backward(loss)
            optimizer.step(0.1)
            found.append(float(loss.detach()))
        return found

    assert losses() == losses()


def test_fresh_weights_find_what_stood_before() -> None:
    """Before any training, noise that comes again is often known, and nothing else is; a seed
    decides, and any shape can be asked for."""
    shape = NetworkShape(300, n_embd=128, n_layer=4, n_head=4, n_ff=32, rope_freq_base=1e7)
    weights = induction_weights(shape, 3)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shape.tensors()
    assert all(weight.requires_grad for weight in weights.values())
    noise = torch.randint(16, 300, (16, 48), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([noise, noise], 1)
    with torch.no_grad():
        right = logits(weights, shape, ids[:, :-1]).argmax(-1) == ids[:, 1:]
    assert right[:, 52:].float().mean() > 0.4
    assert right[:, :47].float().mean() < 0.05
    again, other = induction_weights(shape, 3), induction_weights(shape, 4)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights[EMBEDDING], other[EMBEDDING])
    for n_layer, n_head, n_embd in ((1, 1, 4), (2, 3, 18), (3, 2, 32)):
        shape = NetworkShape(300, n_embd=n_embd, n_layer=n_layer, n_head=n_head, n_ff=8)
        with torch.no_grad():
            assert logits(induction_weights(shape, 1), shape, ids[:1]).isfinite().all()


class Copies:
    """Rows of noise that repeats itself, each after another number of tokens."""

    def draw(self, chance: np.random.Generator, filler: Ids) -> Row:
        n = int(chance.integers(8, len(filler) // 2 + 1))
        noise = chance.choice(np.arange(16, 48, dtype=np.uint32), n, replace=False)
        return np.resize(noise, len(filler)), np.arange(len(filler)) > n


def test_two_layers_learn_induction() -> None:
    """After some hundred steps noise that comes again is known from the first time."""
    torch.manual_seed(0)
    shape = NetworkShape(48, n_embd=32, n_layer=2, n_head=2, n_ff=32, n_ctx=2048)
    curriculum = Curriculum(32, 1, 5)
    objective = RetrievalObjective(windows(48, 2048), Copies(), curriculum)
    weights = init_weights(shape, 1)
    optimizer, shares = Optimizer(weights), [0.0]
    for step in range(1200):
        if step % 50 == 0:
            row = Copies().draw(np.random.default_rng([9, step]), np.zeros(32, np.uint32))
            ids = torch.from_numpy(row[0].astype(np.int64))
            with torch.no_grad():
                likeliest = logits(weights, shape, ids[None, :-1])[0].argmax(-1)
            shares.append(float((likeliest == ids[1:])[row[1][1:]].float().mean()))
            if min(shares[-2:]) > 0.9:
                return
        torch.autograd.backward(objective.loss(weights, shape, step, 1))
        optimizer.step(min(1.0, step / 50))
    raise AssertionError(shares)


def test_command(tmp_path: Path, data_folder: Path, manifest_file: Path) -> None:
    """A model that llama.cpp loads, and a report with its accuracy."""
    out = tmp_path / "out"
    result = CliRunner().invoke(
        towerctl,
        [
            "train",
            "retrieval",
            "--data",
            str(data_folder),
            "--out",
            str(out),
            "--manifest",
            str(manifest_file),
            "--vocab-size",
            "300",
            "--steps",
            "2",
            "--grow-steps",
            "1",
            "--embd",
            "16",
            "--layers",
            "1",
            "--heads",
            "1",
            "--ff",
            "16",
            "--ctx",
            "256",
            "--eval-tokens",
            "64",
            "--threads",
            "1",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == str(out / "retrieval.gguf")
    assert set(report["accuracy"]) == {"passkey", "pairs"}
    assert set(report["accuracy"]["passkey"]) == {"128", "256"}
    with GgufVocabulary(out / "retrieval.gguf") as vocabulary:
        assert vocabulary.n_tokens == 300
        assert len(vocabulary.tokenize(b"The pass key is 12345.")) > 5
