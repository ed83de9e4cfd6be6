"""PBKV's graph predictor (appendix B): the forward pass in numpy. `lab/predict` trains it.

H1 = relu([H0 | A H0] W1'), H2 = relu([H1 | A H1] W2')      GraphSAGE over the call graph (eq. 3)
h_cur = H2[now]; h_path = attention of W_q h_cur over H2 of the steps before (eq. 4)
h_txt = relu(W_t x)                                          x: embedding of the last step
logits[k] = head k of W_4 relu(W_3 [h_cur | h_path | h_txt] + b_3) + b_4, k = 1..N_STEPS

H2 depends on no workflow and is computed once. Symbol 0 stands for agents unseen in training, and
END is the outcome after the last agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.steps import N_TEXT, Vector

Array: TypeAlias = NDArray[np.float32]
UNKNOWN = 0
PATH_MAX = 64
"""The last steps of a path that attention sees."""
WIDTH = 128
HIDDEN = 384


def shapes(n_agents: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a predictor with `n_agents` symbols, including UNKNOWN."""
    n_out = N_STEPS * (n_agents + 1)
    return {
        "embedding": (n_agents, WIDTH),
        "transitions": (n_agents, n_agents),
        "w1": (WIDTH, 2 * WIDTH),
        "w2": (WIDTH, 2 * WIDTH),
        "wq": (WIDTH, WIDTH),
        "wt": (WIDTH, N_TEXT),
        "w3": (HIDDEN, 3 * WIDTH),
        "b3": (HIDDEN,),
        "w4": (n_out, HIDDEN),
        "b4": (n_out,),
        "temperature": (N_STEPS,),
    }


@dataclass(frozen=True)
class GraphWeights:
    """agents: names of the symbols from 1 on; arrays: see `shapes`, float32."""

    agents: tuple[str, ...]
    arrays: Mapping[str, Array]


class GraphPredictor:
    """Predicts with given weights; without `x` from names alone."""

    def __init__(self, weights: GraphWeights) -> None:
        self._weights = weights.arrays
        self._numbers = {name: 1 + i for i, name in enumerate(weights.agents)}
        self._h2 = node_states(weights.arrays)

    def chances(self, path: Sequence[str], x: Vector | None = None) -> Array:
        """Probabilities float32 [N_STEPS, outcomes]: of any agent unseen in training, of each
        agent, and of END. path: at least one step; x: float32 [N_TEXT], the embedding of the last
        step."""
        numbers = [self._numbers.get(name, UNKNOWN) for name in path[-PATH_MAX:]]
        return softmax(self.logits(numbers, x))

    def logits(self, numbers: Sequence[int], x: Vector | None) -> Array:
        """float32 [N_STEPS, outcomes] for one path of symbols."""
        w, h2 = self._weights, self._h2
        current = h2[numbers[-1]]
        before = h2[np.array(numbers[:-1], dtype=np.int64)]
        text = np.zeros(WIDTH, np.float32) if x is None else np.maximum(w["wt"] @ x, 0.0)
        if len(before):
            scores = before @ (w["wq"] @ current) / np.float32(np.sqrt(WIDTH))
            history = softmax(scores) @ before
        else:
            history = np.zeros(WIDTH, np.float32)
        hidden = w["w3"] @ np.concatenate([current, history, text]) + w["b3"]
        flat = w["w4"] @ np.maximum(hidden, 0.0) + w["b4"]
        logits: Array = flat.reshape(N_STEPS, -1) / w["temperature"][:, None]
        return logits


def node_states(w: Mapping[str, Array]) -> Array:
    """H2: float32 [agents, WIDTH] (equation 3)."""
    h, a = w["embedding"], w["transitions"]
    for name in ("w1", "w2"):
        h = np.maximum(np.concatenate([h, a @ h], axis=1) @ w[name].T, 0.0)
    return h


def softmax(scores: Array) -> Array:
    """Softmax over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    chances: Array = powers / powers.sum(axis=-1, keepdims=True)
    return chances
