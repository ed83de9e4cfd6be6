"""The file of a trained predictor, which `lab/predict` writes: a .npz of plain arrays. Nothing in it is
unpickled.

| array | shape | type |
|---|---|---|
| format | | text, FORMAT |
| agents | [agents] | text |
| keys, outcomes | [steps, N_ORDERS], [steps, N_STEPS] | uint64, int32 |
| said, talk | [voters, N_TEXT] | float16 |
| votes | [ways, voters, N_STEPS * (agents + 1)] | float32 |
| weights, curve | [ways, 2, N_STEPS, parts], [ways, N_STEPS, 2] | float32 |
| graph I agents | [its agents] | text; I = 0, 1, ... |
| graph I NAME | `graph.shapes` | float32 |
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from towerd.errors import ConfigError
from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.graph import GraphWeights, shapes
from towerd.policy.predict.mixture import MixtureWeights
from towerd.policy.predict.steps import N_ORDERS, N_TEXT, NONE, PARTS, StepMemory, Steps

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
FORMAT = "towerd-predictor/2"
BYTES_MAX = 1 << 30
"""Limit on the arrays of a file: enough for thousands of agents."""
_GRAPHS_MAX = 16
_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What numpy and zipfile raise for files that they cannot read."""


def load(path: Path) -> MixtureWeights:
    """Read a file of a predictor. Raises ConfigError for anything else."""
    try:
        arrays = _read(path)
    except _UNREADABLE as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} is not a predictor: {why}") from error
    if str(arrays.get("format", "")) != FORMAT:
        raise ConfigError(f"{path} is not a predictor of format {FORMAT}; train it again")
    agents = _names(arrays.get("agents"))
    graphs: list[GraphWeights] = []
    while len(graphs) < _GRAPHS_MAX and f"graph {len(graphs)} agents" in arrays:
        graphs.append(_graph(path, arrays, f"graph {len(graphs)} "))
    wrong = _wrong(arrays, agents)
    if not wrong and any(not set(graph.agents) <= set(agents) for graph in graphs):
        wrong = ["agents of a graph"]
    if wrong:
        raise ConfigError(f"{path} is damaged: {', '.join(wrong)}")
    keys, outcomes = arrays["keys"], arrays["outcomes"]
    n = len(arrays["said"])
    said, talk = (arrays[name].astype(np.float32) for name in ("said", "talk"))
    memory = StepMemory(keys, outcomes, Steps(keys[:n], said, talk, outcomes[:n]), arrays["votes"])
    return MixtureWeights(agents, memory, tuple(graphs), arrays["weights"], arrays["curve"])


def _read(path: Path) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        n_bytes = sum(member.file_size for member in archive.infolist())
    if n_bytes > BYTES_MAX:
        raise ValueError(f"it holds {n_bytes} bytes")
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _names(array: NDArray[Any] | None) -> tuple[str, ...]:
    if array is None or array.ndim != 1 or array.dtype.kind != "U":
        return ()
    return tuple(str(name) for name in array)


def _graph(path: Path, arrays: Arrays, prefix: str) -> GraphWeights:
    agents = _names(arrays[prefix + "agents"])
    wanted = shapes(1 + len(agents))
    wrong = [
        name
        for name, shape in wanted.items()
        if not _is_sound(arrays.get(prefix + name), shape, np.float32)
    ]
    if wrong or not (arrays[prefix + "temperature"] > 0).all():
        raise ConfigError(f"{path} is damaged: {prefix}{', '.join(wrong or ['temperature'])}")
    return GraphWeights(agents, {name: arrays[prefix + name] for name in wanted})


def _wrong(arrays: Arrays, agents: tuple[str, ...]) -> list[str]:
    """Names of arrays that are missing or malformed."""
    n, n_voters, n_ways = (_length(arrays, name) for name in ("keys", "said", "votes"))
    n_outcomes = len(agents) + 1
    wanted: dict[str, tuple[tuple[int, ...], type]] = {
        "keys": ((n, N_ORDERS), np.uint64),
        "outcomes": ((n, N_STEPS), np.int32),
        "said": ((n_voters, N_TEXT), np.float16),
        "talk": ((n_voters, N_TEXT), np.float16),
        "votes": ((n_ways, n_voters, N_STEPS * n_outcomes), np.float32),
        "weights": ((n_ways, 2, N_STEPS, len(PARTS)), np.float32),
        "curve": ((n_ways, N_STEPS, 2), np.float32),
    }
    wrong = [
        name
        for name, (shape, kind) in wanted.items()
        if not _is_sound(arrays.get(name), shape, kind)
    ]
    if not agents or len(set(agents)) < len(agents):
        wrong.append("agents")
    if not wrong:
        outcomes = arrays["outcomes"]
        bounds = {
            "outcomes": bool(((outcomes >= NONE) & (outcomes < n_outcomes)).all()),
            "said": 0 < n_voters <= n,
            "votes": n_ways in (1, 2),
            "weights": bool((arrays["weights"] >= 0).all()),
            "curve": bool((arrays["curve"] > 0).all()),
        }
        wrong = [name for name, is_sound in bounds.items() if not is_sound]
    return wrong


def _length(arrays: Arrays, name: str) -> int:
    return len(arrays[name]) if name in arrays and arrays[name].ndim else 0


def _is_sound(array: NDArray[Any] | None, shape: tuple[int, ...], kind: type) -> bool:
    """Whether the array holds finite numbers and has the dtype and shape of the table above."""
    if array is None or array.dtype != kind or array.shape != shape:
        return False
    return bool(np.isfinite(array).all())
