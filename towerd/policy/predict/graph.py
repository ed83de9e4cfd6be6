"""PBKV's graph predictor (appendix B), the forward pass in numpy; training is in train.py.

H1 = relu([H0 | A H0] W1'), H2 = relu([H1 | A H1] W2')      GraphSAGE over the call graph (eq. 3)
h_cur = H2[now]; h_path = attention of W_q h_cur over H2 of the steps before (eq. 4)
h_txt = relu(W_t x)                                          x: the last step's meaning
logits[k] = head k of W_4 relu(W_3 [h_cur | h_path | h_txt] + b_3) + b_4, k = 1..N_STEPS

H2 depends on no workflow and is computed once. Symbol 0 stands for agents that training has not
seen, and END is the outcome after the last agent.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from towerd.errors import ConfigError
from towerd.policy.predict.base import END, N_STEPS, Forecast
from towerd.policy.predict.features import N_TEXT, Vector

Array: TypeAlias = NDArray[np.float32]
FORMAT = "towerd-predictor/1"
UNKNOWN = 0
PATH_MAX = 64
"""Steps of a path that attention sees."""
WIDTH = 128
HIDDEN = 384
BYTES_MAX = 1 << 30
"""Of a file's arrays: thousands of agents."""
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, TypeError, MemoryError,
               NotImplementedError, zipfile.BadZipFile, zlib.error)  # fmt: skip
"""What numpy and zipfile raise for files that are not what they read."""


def shapes(n_agents: int) -> dict[str, tuple[int, ...]]:
    """The arrays of a predictor of `n_agents` symbols, UNKNOWN among them."""
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

    @property
    def n_parameters(self) -> int:
        """Learned numbers; the transition matrix is counted, not learned."""
        return sum(array.size for name, array in self.arrays.items() if name != "transitions")

    def save(self, path: Path) -> None:
        """Write a .npz; atomic."""
        part = path.with_name(path.name + ".part")
        with part.open("wb") as stream:
            names = np.array(self.agents, dtype=np.str_)
            named: dict[str, Any] = {"format": np.array(FORMAT), "agents": names, **self.arrays}
            np.savez(stream, **named)
        part.replace(path)


def load_weights(path: Path) -> GraphWeights:
    """Read what `GraphWeights.save` wrote. Raises ConfigError for anything else."""
    try:
        arrays = _read(path)
    except _UNREADABLE as error:
        raise ConfigError(f"{path} is no predictor: {error}") from error
    if str(arrays.pop("format", "")) != FORMAT or "agents" not in arrays:
        raise ConfigError(f"{path} is no predictor of format {FORMAT}; train it again")
    agents = tuple(str(name) for name in np.atleast_1d(arrays.pop("agents")))
    wanted = shapes(1 + len(agents))
    wrong = [name for name, shape in wanted.items() if not _is_sound(arrays.get(name), shape)]
    if wrong or not (arrays["temperature"] > 0).all():
        raise ConfigError(f"{path} is damaged: {', '.join(wrong or ['temperature'])}")
    return GraphWeights(agents, {name: arrays[name] for name in wanted})


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz; nothing in it is ever unpickled."""
    with zipfile.ZipFile(path) as archive:
        n_bytes = sum(member.file_size for member in archive.infolist())
    if n_bytes > BYTES_MAX:
        raise ValueError(f"it holds {n_bytes} bytes")
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _is_sound(array: NDArray[Any] | None, shape: tuple[int, ...]) -> bool:
    """Whether these are finite numbers of the one type that `save` writes."""
    if array is None or array.dtype != np.float32 or array.shape != shape:
        return False
    return bool(np.isfinite(array).all())


class GraphPredictor:
    """A Predictor that does not learn any more; without `x` it goes by names alone."""

    def __init__(self, weights: GraphWeights) -> None:
        self._weights = weights.arrays
        self._numbers = {name: 1 + i for i, name in enumerate(weights.agents)}
        self._outcomes = ("", *weights.agents, END)
        self._h2 = node_states(weights.arrays)

    def forecast(self, path: Sequence[str], x: Vector | None = None) -> Forecast:
        """See Predictor.forecast; x: float32 [N_TEXT], the meaning of the last step. Agents
        that training has not seen are never forecast."""
        if not path:
            return ()
        numbers = [self._numbers.get(name, UNKNOWN) for name in path[-PATH_MAX:]]
        chances = softmax(self.logits(numbers, x))
        out: list[dict[str, float]] = []
        for row in chances.tolist():
            known = dict(zip(self._outcomes[1:], row[1:], strict=True))
            out.append(known)
        return out

    def observe(self, path: Sequence[str]) -> None:
        """Learns nothing: `towerctl train predictor` does."""

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
    """Over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    chances: Array = powers / powers.sum(axis=-1, keepdims=True)
    return chances
