"""Muon against its definition (singular values) and against torch's own implementation."""

from __future__ import annotations

import copy

import pytest
import torch

from lab.train.loop import optimizer as own
from lab.train.loop.optimizer import Optimizer, orthogonal
from lab.train.loop.schedule import DECAY_SHARE, WARMUP_STEPS, Budget, in_decay, scale
from lab.train.model.network import NetworkShape, Weights, init_weights

BF16_RTOL = 0.06
"""torch.optim.Muon iterates in bfloat16."""


@pytest.mark.parametrize("size", [(16, 16), (12, 40), (40, 12), (1, 9)])
def test_singular_values_become_one(size: tuple[int, int]) -> None:
    matrices = torch.randn((3, *size), generator=torch.Generator().manual_seed(1))
    out = orthogonal(matrices)
    assert out.shape == matrices.shape
    for before, after in zip(matrices, out, strict=True):
        u, s, v = torch.linalg.svd(before, full_matrices=False)
        # The same singular vectors: in their basis the result is diagonal.
        turned = u.mT @ after @ v.mT
        values = turned.diagonal()
        assert (turned - values.diag()).abs().max() < 1e-3
        assert (values[s > 0.2 * s.max()] - 1).abs().max() < 0.35


def test_same_steps_as_torch() -> None:
    shape = NetworkShape(300, n_embd=32, n_layer=2, n_head=2, n_ff=48)
    mine, theirs = init_weights(shape, 4), init_weights(shape, 4)
    names = [name for name, w in mine.items() if w.ndim == 2 and name.startswith("blk.")]
    muon = torch.optim.Muon(
        [theirs[name] for name in names],
        lr=own.MUON_LR,
        momentum=own.MOMENTUM,
        weight_decay=own.WEIGHT_DECAY,
        adjust_lr_fn="original",
    )
    adam = torch.optim.AdamW(
        [w for name, w in theirs.items() if name not in names],
        lr=own.ADAM_LR,
        betas=own.BETAS,
        weight_decay=0.0,
    )
    optimizer = Optimizer(mine)
    start = {name: weight.detach().clone() for name, weight in mine.items()}
    chance = torch.Generator().manual_seed(9)
    for _ in range(3):
        for name, weight in mine.items():
            weight.grad = torch.randn(weight.shape, generator=chance)
            theirs[name].grad = weight.grad.clone()
        optimizer.step(1.0)
        muon.step()
        adam.step()
    for name, weight in mine.items():
        moved, expected = weight - start[name], theirs[name] - start[name]
        rtol = BF16_RTOL if name in names else 1e-5
        assert (moved - expected).norm() <= rtol * expected.norm(), name


def test_state_is_all_that_the_next_step_depends_on() -> None:
    shape = NetworkShape(40, n_embd=16, n_layer=1, n_head=1, n_ff=16)
    one = init_weights(shape, 4)
    optimizer = Optimizer(one)

    def step(weights: Weights, with_optimizer: Optimizer, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=chance)
        with_optimizer.step(0.7)

    for seed in (1, 2):
        step(one, optimizer, seed)
    two = {name: weight.detach().clone().requires_grad_() for name, weight in one.items()}
    again = Optimizer(two)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (3, 4):
        step(one, optimizer, seed)
        step(two, again, seed)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_schedule() -> None:
    """Up in a straight line, level, down in a straight line to nothing."""
    assert scale(0, 0.0) == 1 / WARMUP_STEPS
    assert scale(WARMUP_STEPS, 0.1) == scale(10_000, 1 - DECAY_SHARE) == 1.0
    assert scale(10_000, 1 - DECAY_SHARE / 2) == pytest.approx(0.5)
    assert scale(10_000, 1.0) == 0.0
    assert scale(5, 0.05) == 0.5  # of a budget of 100 steps, ten are the warm-up
    assert in_decay(0.99)
    assert not in_decay(0.5)


def test_budget() -> None:
    assert Budget(steps=10).progress(5, 1e9) == 0.5
    assert Budget(minutes=2).progress(10**6, 60.0) == 0.5
    assert Budget(minutes=2).progress(0, 500.0) == 1.0
