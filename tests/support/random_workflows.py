"""Made-up agent workflows, and graph models of random weights."""

from __future__ import annotations

import random

import numpy as np

from lab.predict.runs import FinishedRun
from lab.predict.words import hash_text
from towerd.policy.predict.graph import GraphWeights, shapes


def random_weights(agents: tuple[str, ...], seed: int = 0) -> GraphWeights:
    rng = np.random.default_rng(seed)
    arrays = {
        name: (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes(1 + len(agents)).items()
    }
    arrays["temperature"] = np.array([0.7, 1.0, 1.5], np.float32)
    arrays["transitions"] = np.abs(arrays["transitions"])
    return GraphWeights(agents, arrays)


def workflows(n: int) -> list[FinishedRun]:
    """The next step depends on the first step and on the texts so far."""
    rng, runs = random.Random(0), []
    for i in range(n):
        word = rng.choice(["refund", "cancel"])
        first = rng.choice(["plan", "ask"])
        steps = (first, "think", "pay" if word == "refund" else "stop", "done" * (first == "ask"))
        names = tuple(name for name in steps if name)
        said = [hash_text(f"please {word} it"), *[hash_text(word)] * (len(names) - 1)]
        runs.append(FinishedRun(names, tuple(said), f"task {i // 2}"))
    return runs
