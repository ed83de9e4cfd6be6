"""Muon for the matrices, AdamW for the embedding and the norms."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from lab.train.model.network import Weights

MUON_LR = 0.02
ADAM_LR = 0.004
MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
BETAS = (0.9, 0.95)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
N_NEWTON_SCHULZ = 5


class Optimizer:
    """One step at a time, with the learning rates of a constant schedule scaled by `scale`.

    torch.optim.Muon does the same one matrix after another in bfloat16, which costs a CPU a fifth
    of the training time at these sizes; equal matrices are stacked here and stay float32.
    """

    def __init__(self, weights: Weights) -> None:
        matrices = [n for n, w in weights.items() if w.ndim == 2 and n.startswith("blk.")]
        self._groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name in matrices:
            self._groups[tuple(weights[name].shape)].append(weights[name])
        self._momenta = {
            shape: torch.zeros((len(group), *shape), device=group[0].device)
            for shape, group in self._groups.items()
        }
        others = [weight for name, weight in weights.items() if name not in matrices]
        self._adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=BETAS, weight_decay=0.0)

    def step(self, scale: float) -> None:
        """Apply and clear the gradients."""
        with torch.no_grad():
            for shape, group in self._groups.items():
                gradients = torch.stack([weight.grad for weight in group])
                self._step_matrices(group, gradients, self._momenta[shape], MUON_LR * scale)
        for options in self._adam.param_groups:
            options["lr"] = ADAM_LR * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"momenta": list(self._momenta.values()), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of `state_dict`."""
        for mine, saved in zip(self._momenta.values(), state["momenta"], strict=True):
            mine.copy_(saved)
        self._adam.load_state_dict(state["adam"])

    @staticmethod
    def _step_matrices(group: list[Tensor], gradients: Tensor, momenta: Tensor, lr: float) -> None:
        momenta.lerp_(gradients, 1 - MOMENTUM)
        updates = orthogonal(gradients.lerp(momenta, MOMENTUM))  # Nesterov
        n_out, n_in = gradients.shape[1:]
        size = lr * max(1.0, n_out / n_in) ** 0.5
        for weight, update in zip(group, updates, strict=True):
            weight.mul_(1 - lr * WEIGHT_DECAY).add_(update, alpha=-size)
            weight.grad = None


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, rows, columns] -> the same shape with every singular value near 1, by the quintic
    Newton-Schulz iteration of Muon (Keller Jordan and others, 2024)."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(N_NEWTON_SCHULZ):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
