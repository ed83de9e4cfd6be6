"""Theorem 9: a tower composed from segments equals monolithic prefill.

Each segment is decoded where the tower of the ones before it happens to stand, at source
positions of its own, after rows that were themselves moved there: errors can pile up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from roped import Roped, Values, keys_of, some_ids, values_of

from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows, join
from towerd.slots.shift import compose_at

DEPTH = 8
LENGTHS = (40, 17, 33, 8, 25, 64, 1, 30)
EPSILON = 2**-10
"""Rounding of a 16-bit rotation relative to the key's length (Corollary 11)."""
NAMES = ["llama", "yarn", "qwen3", "phi3-long", "stablelm", "smollm3", "qwen2vl", "deepseek2"]


@pytest.fixture(scope="module", params=NAMES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Roped]:
    made = Roped(tmp_path_factory.mktemp("towers"), request.param)
    yield made
    made.close()


def build(model: Roped, sources: list[int]) -> list[list[KVRows]]:
    """The towers of depth 1 to len(sources), each the one before, moved, and one more segment."""
    towers: list[list[KVRows]] = []
    tower: list[KVRows] = []
    for depth, source in enumerate(sources):
        ids = some_ids(LENGTHS[depth], seed=depth)
        if tower:
            there = compose_at(tower, model.rope, start=source)
            segment = model.continued(there, ids).rows
            tower = compose_at([*there, segment], model.rope)
        else:
            tower = compose_at([model.fresh(ids, source).rows], model.rope)
        towers.append(tower)
    return towers


def worst(rows: KVRows, reference: KVRows, rope: Rope) -> float:
    """The largest error of a head's key, or of a row's values, relative to its length."""
    errors = [worst_value(rows, reference, rope)]
    for i, layer in enumerate(rope.layers):
        errors.append(_worst(keys_of(rows, i), keys_of(reference, i), layer.head_dim))
    return max(errors)


def worst_value(rows: KVRows, reference: KVRows, rope: Rope) -> float:
    """The largest error of a row's values; of MLA, those of the latent in its keys."""
    if not reference.layout.v:
        first = rope.layers[0].first
        layers = range(reference.layout.n_layer)
        pairs = [(keys_of(rows, i)[:, :first], keys_of(reference, i)[:, :first]) for i in layers]
    else:
        planes = zip(reference.layout.v, rows.v, reference.v, strict=True)
        pairs = [(values_of(plane, a), values_of(plane, b)) for plane, a, b in planes]
    return max(_worst(mine, theirs, theirs.shape[1]) for mine, theirs in pairs)


def _worst(mine: Values, theirs: Values, size: int) -> float:
    shape = (len(mine), -1, size)
    error = np.linalg.norm((mine - theirs).reshape(shape), axis=2)
    return float((error / np.linalg.norm(theirs.reshape(shape), axis=2)).max())


@pytest.mark.parametrize("seed", [0, 1])
def test_towers_equal_prefill(model: Roped, seed: int) -> None:
    """Every key and value of depth 1 to 8, within Corollary 11's bound, linear in the depth,
    beside what llama.cpp's own prefills of these tokens at two positions differ by; and the
    logits after the whole tower."""
    sources = np.random.default_rng(seed).integers(0, 1700, DEPTH).tolist()
    ids = np.concatenate([some_ids(n, seed=i) for i, n in enumerate(LENGTHS)])
    reference = model.fresh(ids, 0).rows
    own = worst_value(model.fresh(ids, 1200).rows, reference, model.rope)
    towers = build(model, sources)
    for depth, tower in enumerate(towers, start=1):
        rows = join(tower)
        assert np.array_equal(rows.positions, np.arange(len(rows)))
        error = worst(rows, reference.slice(0, len(rows)), model.rope)
        assert error <= depth * EPSILON + own, f"depth {depth}: {error:.2e}"
    more = some_ids(5, seed=99)
    expected = model.fresh(np.concatenate([ids, more]), 0).logits
    logits = model.continued(towers[-1], more).logits
    assert float(np.abs(logits - expected).max()) <= 0.02 * float(expected.std())


def test_another_context_is_another_segment(model: Roped) -> None:
    """The theorem's condition matters: a segment of the same tokens that was computed after
    other ones is not what prefill gives."""
    before, other, ids = some_ids(40), some_ids(40, 7), some_ids(30, 1)
    reference = model.fresh(np.concatenate([before, ids]), 0).rows
    stranger = model.fresh(np.concatenate([other, ids]), 100).rows.slice(140, 170)
    tower = compose_at([model.fresh(before, 0).rows, stranger], model.rope)
    assert worst(join(tower), reference, model.rope) > 50 * EPSILON
