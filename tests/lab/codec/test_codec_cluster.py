"""Clusters of prompts: planted ones are found, the search finds what brute force finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.codec.cluster import Distances, cluster, measure, total_bits
from towerd.codec import Codec
from towerd.codec.forms import mini
from towerd.codec.prior import sample
from towerd.codec.vocabulary import GgufVocabulary

GROUPS, MEMBERS = 3, 3
Ids = npt.NDArray[np.int32]
Bits = npt.NDArray[np.float64]


def planted(small: GgufVocabulary) -> list[Ids]:
    """Prompts of three kinds: those of a kind share all but a sentence."""
    text = sample.load()
    prompts = []
    for group in range(GROUPS):
        common = text[group * 9000 : group * 9000 + 1500]
        for member in range(MEMBERS):
            at = 40_000 + 500 * (group * MEMBERS + member)
            own = text[at : at + 150]
            prompts.append(small.tokenize(common[:800] + own + common[800:]))
    return prompts


@pytest.fixture(scope="module", params=["network", "mix"])
def codec(small: GgufVocabulary, request: pytest.FixtureRequest) -> Iterator[Codec]:
    """With the mini model of the package, and without one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "mix":
            patch.setattr(mini, "PATH", Path("none"))
        codec = Codec(small)
        assert codec.text_coder().name == request.param
        yield codec


@pytest.fixture(scope="module")
def measured(small: GgufVocabulary, codec: Codec) -> tuple[list[Ids], Distances]:
    prompts = planted(small)
    return prompts, measure(prompts, codec.text_coder())


def test_distances_are_distances(measured: tuple[list[Ids], Distances]) -> None:
    """Never negative, next to nothing to itself, the same both ways, never over `alone`."""
    prompts, found = measured
    n = len(prompts)
    assert found.given.shape == (n, n)
    assert (found.given >= 0).all()
    assert (found.given <= found.alone[:, None]).all()
    assert (np.diag(found.given) < 0.1 * found.alone).all()
    for i, j in itertools.combinations(range(n), 2):
        assert found.between(i, j) == found.between(j, i)
        same = i // MEMBERS == j // MEMBERS
        assert (found.between(i, j) < 0.5 * found.alone[i]) == same


def test_planted_clusters_are_found(measured: tuple[list[Ids], Distances]) -> None:
    _, found = measured
    for n_clusters in (None, GROUPS):
        clusters = cluster(found, n_clusters)
        sets = sorted(sorted([c.medoid, *c.members]) for c in clusters)
        assert sets == [list(range(g * MEMBERS, (g + 1) * MEMBERS)) for g in range(GROUPS)]
        for each in clusters:
            assert each.radius(found) == max(found.given[i, each.medoid] for i in each.members)


def test_members_decode_on_top_of_their_medoid(
    measured: tuple[list[Ids], Distances], codec: Codec
) -> None:
    """Exactly, and in fewer bytes; `given` says how many but for the header."""
    prompts, found = measured
    form = codec.text_coder().name
    each = cluster(found)[0]
    for i in each.members:
        base = prompts[each.medoid]
        blob = codec.encode(prompts[i], base=base, form=form)
        assert codec.decode(blob, base=base).tolist() == prompts[i].tolist()
        assert len(blob) < len(codec.encode(prompts[i], form=form))
        assert 0 < len(blob) - found.given[i, each.medoid] / 8 < 100


def test_a_member_has_to_pay_for_its_base() -> None:
    alone = np.array([100.0, 90.0])
    alike = Distances(alone, np.array([[0.0, 80.0], [70.0, 0.0]]))
    assert [(c.medoid, c.members) for c in cluster(alike)] == [(0, (1,))]
    assert [(c.medoid, c.members) for c in cluster(alike, base_bits=25)] == [(0, ()), (1, ())]


def test_nothing_alike_makes_no_clusters() -> None:
    alone = np.array([5.0, 7.0, 9.0])
    strangers = Distances(alone, np.repeat(alone[:, None], 3, axis=1))
    assert [(c.medoid, c.members) for c in cluster(strangers)] == [(0, ()), (1, ()), (2, ())]
    assert cluster(Distances(np.zeros(0), np.zeros((0, 0)))) == []
    for n_clusters in (0, 4):
        with pytest.raises(ValueError, match=f"{n_clusters} clusters"):
            cluster(strangers, n_clusters)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.integers(0, 2**32 - 1), st.booleans())
def test_against_brute_force(n: int, seed: int, is_fixed: bool) -> None:
    """One medoid: the best one. Any number: within a tenth of the best set of medoids, and no
    single added, dropped or swapped medoid would help."""
    rng = np.random.default_rng(seed)
    places = rng.random((n, 2)) * 100
    alone = rng.uniform(50, 150, n)
    given_ = np.minimum(np.linalg.norm(places[:, None] - places, axis=2), alone[:, None])
    distances = Distances(alone, given_)
    single = cluster(distances, 1)
    costs = [alone[m] + given_[:, m].sum() for m in range(n)]
    assert single[0].medoid == int(np.argmin(costs))
    n_fixed = int(rng.integers(1, n + 1)) if is_fixed else None
    found = cluster(distances, n_fixed)
    assert sorted(i for c in found for i in (c.medoid, *c.members)) == list(range(n))
    sizes = [n_fixed] if n_fixed else range(1, n + 1)
    best = min(
        _cost(alone, given_, each)
        for size in sizes
        for each in itertools.combinations(range(n), size)
    )
    assert best - 1e-6 <= total_bits(distances, found) <= 1.1 * best
    if n_fixed:
        assert len(found) == n_fixed


def _cost(alone: Bits, given_: Bits, medoids: tuple[int, ...]) -> float:
    others = [i for i in range(len(alone)) if i not in medoids]
    return float(
        alone[list(medoids)].sum() + given_[np.ix_(others, list(medoids))].min(axis=1).sum()
    )
