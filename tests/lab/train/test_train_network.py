"""The torch network against llama.cpp on the exported file: the same weights, the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from lab.train.data.bpe import CONTROLS, Bpe
from lab.train.errors import TrainError
from lab.train.model.export import Card, export
from lab.train.model.network import NetworkShape, Weights, init_weights, logits
from lab.train.objectives.teacher import Teacher

LOGIT_ATOL = {"f32": 2e-4, "f16": 2e-2}
"""Float noise of llama.cpp's and torch's sums, and of the activations that llama.cpp rounds to
16 bits where the weights have 16."""

SHAPES = [
    NetworkShape(600, n_embd=64, n_layer=3, n_head=2, n_ff=96, n_ctx=160),
    NetworkShape(300, n_embd=32, n_layer=1, n_head=1, n_ff=32, n_ctx=96),
    NetworkShape(400, n_embd=96, n_layer=2, n_head=6, n_ff=64, n_ctx=128, rope_freq_base=500.0),
]


def bytes_only(n_vocab: int) -> Bpe:
    """A vocabulary of the asked size without a tokenizer's training."""
    alphabet = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    alphabet += [chr(256 + i) for i in range(256 - len(alphabet))]
    pairs = [(a, b) for a in alphabet for b in alphabet][: n_vocab - len(CONTROLS) - 256]
    return Bpe([*CONTROLS, *alphabet, *(a + b for a, b in pairs)], pairs)


def busy_weights(shape: NetworkShape) -> Weights:
    """Weights with every part of the network at work: nothing zero, no norm of ones."""
    chance = torch.Generator().manual_seed(5)
    weights = init_weights(shape, 1)
    with torch.no_grad():
        for weight in weights.values():
            if weight.ndim == 1:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=chance))
            else:
                std = 0.3 if weight.shape[0] == shape.n_vocab else 1.5 * weight.shape[1] ** -0.5
                weight.copy_(std * torch.randn(weight.shape, generator=chance))
    return weights


@pytest.mark.parametrize("ftype", ["f32", "f16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.n_layer}x{shape.n_embd}")
def test_llama_cpp_gives_the_same_logits(tmp_path: Path, shape: NetworkShape, ftype: str) -> None:
    weights = busy_weights(shape)
    path = tmp_path / "m.gguf"
    card = Card("m", "d", "MIT", {})
    export(path, weights, shape, bytes_only(shape.n_vocab).vocabulary(), card, ftype=ftype)
    if ftype == "f16":
        weights = {n: w.half().float() if w.ndim == 2 else w for n, w in weights.items()}
    ids = np.random.default_rng(2).integers(0, shape.n_vocab, shape.n_ctx).astype(np.uint32)
    with torch.no_grad():
        mine = logits(weights, shape, torch.from_numpy(ids.astype(np.int64))[None])[0]
    log_p = mine.log_softmax(-1).numpy()
    with Teacher(path, shape.n_ctx) as teacher:
        found = teacher.targets(ids, shape.n_vocab)
    theirs = np.empty_like(log_p)
    np.put_along_axis(theirs, found.ids, np.log(np.maximum(found.p, 1e-30)), axis=1)
    likely = log_p > -30
    assert log_p.std() > 0.5
    np.testing.assert_allclose(theirs[likely], log_p[likely], atol=LOGIT_ATOL[ftype] * 10)
    assert np.abs(theirs - log_p)[likely].mean() < LOGIT_ATOL[ftype]


def test_nothing_looks_ahead() -> None:
    shape = SHAPES[0]
    weights = busy_weights(shape)
    ids = torch.randint(0, 600, (1, 40), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 25:] = 7
    with torch.no_grad():
        one, two = (logits(weights, shape, x) for x in (ids, other))
    assert torch.equal(one[0, :25], two[0, :25])
    assert not torch.allclose(one[0, 25:], two[0, 25:])


def test_fresh_weights_expect_nothing() -> None:
    """Before training every token is about equally likely, at any depth."""
    shape = SHAPES[0]
    with torch.no_grad():
        log_p = logits(init_weights(shape, 3), shape, torch.arange(64)[None]).log_softmax(-1)
    assert abs(float(log_p.mean()) + np.log(600)) < 0.1


def test_weights_depend_on_the_seed_alone() -> None:
    same = [init_weights(SHAPES[1], seed)["blk.0.attn_q.weight"] for seed in (1, 1, 2)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_exported_file_says_what_it_is(tmp_path: Path) -> None:
    shape = SHAPES[1]
    card = Card("mini", "made for a test", "MIT", {"tokens": 12, "bits_per_byte": 1.5})
    path = tmp_path / "m.gguf"
    export(path, init_weights(shape, 0), shape, bytes_only(300).vocabulary(), card)
    fields = GGUFReader(path).fields
    assert fields["general.license"].contents() == "MIT"
    assert fields["towerd.train.tokens"].contents() == 12
    assert fields["towerd.train.bits_per_byte"].contents() == 1.5
    assert fields["llama.context_length"].contents() == 96
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: NetworkShape(300, n_embd=30, n_head=4),
        lambda: NetworkShape(300, n_embd=6, n_head=2),
        lambda: NetworkShape(0),
        lambda: NetworkShape(300, n_layer=0),
    ],
)
def test_impossible_shapes(make: Callable[[], NetworkShape]) -> None:
    with pytest.raises(TrainError):
        make()


def test_impossible_exports(tmp_path: Path) -> None:
    shape = SHAPES[1]
    weights, card = init_weights(shape, 0), Card("m", "d", "MIT", {})
    with pytest.raises(TrainError, match="tokenizer"):
        export(tmp_path / "m", weights, shape, bytes_only(310).vocabulary(), card)
    with pytest.raises(TrainError, match="file type"):
        export(tmp_path / "m", weights, shape, bytes_only(300).vocabulary(), card, ftype="q4")
    assert not list(tmp_path.iterdir())
