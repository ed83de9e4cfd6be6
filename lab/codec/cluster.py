"""Finds similar prompts and codes them on top of each other (section 11 of the towers paper).

The distance of one prompt to another is the number of bits that the codec's model needs for it
after it has read the other: bits of A given B, an upper bound of the conditional information (Li
and others, "The Similarity Metric", 2004). The medoids are chosen so that all bits together are
fewest: each medoid is written by itself and each other prompt on top of its medoid, which is the
storage that theorem 32 counts. The number of medoids follows from that, too. The search is the
partitioning around medoids of Kaufman and Rousseeuw (1990) with steps that add and drop a medoid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.codec.forms.mix import BASE_IDS_MAX, Mix, Symbols
from towerd.codec.forms.network import Network
from towerd.codec.forms.training import bits_of
from towerd.codec.text import from_ids
from towerd.tokens import Ids

NEIGHBOURS_MAX = 16
"""How many other prompts are read before each prompt: those that share most with it."""
RUN = 4
"""Length in symbols of a run that counts as shared by two prompts."""

Bits = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distances:
    """`alone` float64[n]: bits of each prompt; `given` float64[n, n]: bits of prompt i after
    prompt j, at most `alone`, because a coder need not use a base that does not help."""

    alone: Bits
    given: Bits

    def between(self, i: int, j: int) -> float:
        """The symmetric distance in bits: the larger one of both."""
        return float(max(self.given[i, j], self.given[j, i]))


@dataclass(frozen=True)
class Cluster:
    """A cluster, as indexes of prompts; `members` are without the medoid, in order."""

    medoid: int
    members: tuple[int, ...]

    def radius(self, distances: Distances) -> float:
        """Bits of the member that is farthest from the medoid; 0 without members."""
        return max((float(distances.given[i, self.medoid]) for i in self.members), default=0.0)


def measure(prompts: Sequence[Ids], coder: Mix | Network) -> Distances:
    """Distances of prompts, int32[n] ids of the coder's vocabulary each (`Codec.text_coder`). Pairs
    beyond the NEIGHBOURS_MAX that share most are not measured and count as unrelated."""
    texts = [coder.mini.symbols(from_ids(ids, coder.vocabulary).text) for ids in prompts]
    alone = np.zeros(len(texts))
    given = np.zeros((len(texts), len(texts)))
    for i, near in enumerate(neighbours(texts)):
        text = texts[i]
        alone[i], *after = costs(coder, text, [text[:0], *(texts[j] for j in near)])
        given[i] = alone[i]
        given[i, near] = np.minimum(after, alone[i])
    return Distances(alone, given)


def costs(coder: Mix | Network, text: Symbols, contexts: Sequence[Symbols]) -> list[float]:
    """The bits that a text takes in one chunk after each of `contexts`, of which only the last
    BASE_IDS_MAX symbols are read."""
    read = [context[-BASE_IDS_MAX:] for context in contexts]
    if isinstance(coder, Network):
        return _with_model(coder, text, read)
    found = []
    for context in read:
        with coder.mixers.borrow(len(text), context) as mixer:
            found.append(bits_of(*mixer.encode(0, text)))
    return found


def _with_model(coder: Network, text: Symbols, contexts: Sequence[Symbols]) -> list[float]:
    """The model reads the text once for all contexts."""
    lanes = coder.lanes
    before = [lanes.first, *lanes.order[text[:-1]].tolist()]
    found = np.zeros(len(contexts))
    with lanes.predictors.borrow() as predictor, ExitStack() as stack:
        mixers = [stack.enter_context(lanes.mixer([len(text)], each)) for each in contexts]
        for start in range(0, len(text), lanes.window):
            pairs = [(0, token) for token in before[start : start + lanes.window]]
            for at, counts in enumerate(predictor.feed(pairs), start):
                rank, by_rank = text[at : at + 1], counts[lanes.order]
                found += [bits_of(*mixer.encode(0, rank, by_rank)) for mixer in mixers]
    return [float(bits) for bits in found]


def neighbours(texts: Sequence[Symbols]) -> list[list[int]]:
    """For each text, itself and the NEIGHBOURS_MAX others that share most runs with it."""
    runs = [
        {tuple(text[at : at + RUN]) for at in range(len(text) - RUN + 1)}
        for text in (each.tolist() for each in texts)
    ]
    holders: dict[tuple[int, ...], list[int]] = {}
    for i, each in enumerate(runs):
        for run in each:
            holders.setdefault(run, []).append(i)
    found = []
    for i, each in enumerate(runs):
        shared = Counter(j for run in each for j in holders[run] if j != i)
        ranked = sorted(shared, key=lambda j: (-shared[j], j))
        found.append([i, *ranked[:NEIGHBOURS_MAX]])
    return found


def cluster(
    distances: Distances, n_clusters: int | None = None, base_bits: float = 0.0
) -> list[Cluster]:
    """The clusters with the fewest bits that the search finds. Each member costs `base_bits` more.
    n_clusters: their number; None: as many as pay. ValueError unless 1 <= n_clusters <= the number
    of prompts."""
    n = len(distances.alone)
    if n_clusters is not None and not 1 <= n_clusters <= n:
        raise ValueError(f"{n} prompts cannot make {n_clusters} clusters.")
    if n == 0:
        return []
    costs = distances.given + base_bits
    np.fill_diagonal(costs, 0)
    medoids = _searched(costs, distances.alone, n_clusters)
    nearest = np.array(medoids)[np.argmin(costs[:, medoids], axis=1)]
    nearest[medoids] = medoids
    if n_clusters is None:  # no prompt gains by joining an unrelated medoid
        strangers = costs[np.arange(n), nearest] >= distances.alone
        nearest = np.where(strangers, np.arange(n), nearest)
        medoids = np.unique(nearest).tolist()
    return [
        Cluster(m, tuple(int(i) for i in np.flatnonzero(nearest == m) if i != m)) for m in medoids
    ]


def total_bits(distances: Distances, clusters: Sequence[Cluster]) -> float:
    """The bits of all prompts: medoids alone, members given their medoid."""
    return sum(
        float(distances.alone[c.medoid])
        + sum(float(distances.given[i, c.medoid]) for i in c.members)
        for c in clusters
    )


def _searched(costs: Bits, alone: Bits, n_clusters: int | None) -> list[int]:
    """Medoids, ascending: starting from the best single one, the best step (add, drop or swap one)
    until none helps. For a fixed number, medoids are first added up to it and then only swapped."""
    medoids = _best([[i] for i in range(len(alone))], costs, alone)
    while n_clusters is not None and len(medoids) < n_clusters:
        medoids = _best(_added(medoids, len(alone)), costs, alone)
    while True:
        steps = _swapped(medoids, len(alone))
        if n_clusters is None:
            steps += _added(medoids, len(alone)) + _dropped(medoids)
        better = _best([medoids, *steps], costs, alone)
        if better == medoids:
            return medoids
        medoids = better


def _added(medoids: list[int], n: int) -> list[list[int]]:
    return [sorted([*medoids, i]) for i in range(n) if i not in medoids]


def _dropped(medoids: list[int]) -> list[list[int]]:
    return [[m for m in medoids if m != out] for out in medoids if len(medoids) > 1]


def _swapped(medoids: list[int], n: int) -> list[list[int]]:
    return [added for left in _dropped(medoids) or [[]] for added in _added(left, n)]


def _best(candidates: list[list[int]], costs: Bits, alone: Bits) -> list[int]:
    """The first of those with the fewest bits."""
    totals = [alone[each].sum() + costs[:, each].min(axis=1).sum() for each in candidates]
    return candidates[int(np.argmin(totals))]
