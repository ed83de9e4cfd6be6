"""attention_mass: one weight at a time as the oracle, all instruction sets, bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_rows import at_odd_address

from lab import reference
from lab.reference.transcode import decode, encode
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME

Floats = npt.NDArray[np.float32]

TOLERANCE = 2e-6
"""Of the largest mass, plus as much per query row that adds to it: float32 weights and sums."""


def draw(m: int, n: int, heads: int, kv: int, dim: int, name: str, seed: int = 0) -> Any:
    """(queries, keys, format, n_seen, head_dim, scale) of ordinary numbers; some scores stand out."""
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((m, heads * dim)).astype(np.float32) * 2
    keys = encode(BY_NAME[name], rng.standard_normal((n, kv * dim)).astype(np.float32))
    n_seen = rng.integers(1, n + 1, m).astype(np.int64)
    return queries, keys, name, n_seen, dim, 1 / math.sqrt(dim)


def masses(arguments: Any, n_threads: int) -> Floats:
    """The masses by the kernels in use."""
    queries, keys, name, n_seen, dim, scale = arguments
    return dispatch.attention_mass(queries, keys, name, n_seen, dim, scale, n_threads)


def check(arguments: Any, n_threads: int = 2) -> Floats:
    """The masses by the kernels in use, checked against the reference."""
    got = masses(arguments, n_threads)
    expected = reference.attention_mass(*arguments)
    m, heads = len(arguments[0]), arguments[0].shape[1] // arguments[4]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=TOLERANCE * max(1.0, m * heads))
    np.testing.assert_allclose(got.sum(axis=1), m * heads / len(got), rtol=1e-4)
    return got


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 5, 16]),
    st.integers(1, 9),
)
def test_every_weight(
    kernels: str, seed: int, m: int, kv: int, group: int, dim: int, n: int
) -> None:
    """The sum of softmaxes, worked out one weight at a time."""
    arguments = draw(m, n, kv * group, kv, dim, "f16", seed)
    queries, rows, _, n_seen, _, scale = arguments
    keys = decode(BY_NAME["f16"], rows).reshape(n, kv, dim).astype(np.float64)
    expected = np.zeros((kv, n))
    for i, q in enumerate(queries.reshape(m, kv * group, dim).astype(np.float64)):
        for h in range(kv * group):
            dots = [float(q[h] @ keys[j, h // group]) * scale for j in range(int(n_seen[i]))]
            top = max(dots)
            total = sum(math.exp(dot - top) for dot in dots)
            for j, dot in enumerate(dots):
                expected[h // group, j] += math.exp(dot - top) / total
    np.testing.assert_allclose(check(arguments), expected, atol=1e-5 * m * kv * group)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 700])
def test_sinks_take_their_share(kernels: str, n: int) -> None:
    """As a further key would whose product with every query of a head is its sink."""
    queries, keys, name, n_seen, dim, scale = draw(5, n, 4, 2, 24, "f32", n)
    sinks = np.array([0.5, -3.0, 9.0, 2.0], np.float32)
    found = dispatch.attention_mass(queries, keys, name, n_seen, dim, scale, sinks=sinks)
    expected = reference.attention_mass(queries, keys, name, n_seen, dim, scale, sinks=sinks)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=20 * TOLERANCE)
    longer = np.zeros((5, 4, dim + 1), np.float32)
    longer[:, :, :dim], longer[:, :, dim] = queries.reshape(5, 4, dim), sinks / scale
    rows = np.zeros((n + 1, 2, dim + 1), np.float32)
    rows[1:, :, :dim], rows[0, :, dim] = keys.view(np.float32).reshape(n, 2, dim), 1
    flat = longer.reshape(5, -1), rows.reshape(n + 1, -1).view(np.uint8)
    beside = reference.attention_mass(*flat, name, n_seen + 1, dim + 1, scale)
    np.testing.assert_allclose(found, beside[:, 1:], rtol=1e-5, atol=20 * TOLERANCE)
    for bad in (sinks[:3], np.append(sinks[1:], np.float32(np.nan)), sinks[::-1]):
        with pytest.raises(ValueError, match="sinks"):
            dispatch.attention_mass(queries, keys, name, n_seen, dim, scale, sinks=bad)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_weights_of_queries(kernels: str, has_sinks: bool) -> None:
    """The sum of what each query spreads by itself, times its weight."""
    queries, keys, name, n_seen, dim, scale = draw(21, 150, 4, 2, 24, "f16")
    sinks = np.array([0.5, -3.0, 9.0, 2.0], np.float32) if has_sinks else None
    weights = np.linspace(-1, 2, 21).astype(np.float32)
    weights[7] = 0
    found = dispatch.attention_mass(
        queries, keys, name, n_seen, dim, scale, sinks=sinks, weights=weights
    )
    expected = np.zeros((2, 150))
    for i, weight in enumerate(weights):
        one = queries[i : i + 1], keys, name, n_seen[i : i + 1], dim, scale
        expected += weight * reference.attention_mass(*one, sinks=sinks)
    np.testing.assert_allclose(found, expected, atol=84 * TOLERANCE)
    same = reference.attention_mass(
        queries, keys, name, n_seen, dim, scale, sinks=sinks, weights=weights
    )
    np.testing.assert_allclose(same, expected, atol=84 * TOLERANCE)
    for bad in (weights[:3], np.append(weights[1:], np.float32(np.inf)), weights[::-1]):
        with pytest.raises(ValueError, match="weights"):
            dispatch.attention_mass(queries, keys, name, n_seen, dim, scale, weights=bad)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 63, 64, 65, 129, 1000])
def test_lengths(kernels: str, name: str, n: int) -> None:
    """Any number of keys, at odd addresses and apart; heads that share or do not share keys."""
    for heads, kv, dim in ((4, 1, 64), (3, 3, 80), (6, 2, 33), (1, 1, 1)):
        queries, keys, *rest = draw(7, n, heads, kv, dim, name, n)
        check((queries, at_odd_address(keys), *rest))


@pytest.mark.parametrize("m", [1, 3, 4, 5, 16, 17, 40])
def test_numbers_of_queries(kernels: str, m: int) -> None:
    """Whole tiles and the rest; rows of queries that lie apart."""
    queries, *rest = draw(m, 150, 4, 2, 64, "f16", m)
    apart = np.full((m, queries.shape[1] + 5), np.nan, np.float32)
    apart[:, :-5] = queries
    check((apart[:, :-5], *rest))


def test_threads_do_not_change_the_result(kernels: str) -> None:
    """To the bit, and in every run."""
    arguments = draw(40, 3000, 8, 2, 64, "f16")
    first = check(arguments, 1)
    for n_threads in (2, 3, 7):
        assert np.array_equal(masses(arguments, n_threads), first)


def test_what_is_not_seen_does_not_matter(kernels: str) -> None:
    """Keys after the last that a query sees get nothing and change nothing."""
    queries, keys, name, _, dim, scale = draw(3, 200, 4, 2, 64, "f32")
    seen = np.array([1, 77, 120], np.int64)
    whole = dispatch.attention_mass(queries, keys, name, seen, dim, scale)
    short = dispatch.attention_mass(queries, keys[:120], name, seen, dim, scale)
    assert np.array_equal(whole[:, :120], short)
    assert not whole[:, 120:].any()


def test_far_apart_scores(kernels: str) -> None:
    """One key takes all, and weights too small for a float are 0; a scale of 0 spreads evenly."""
    queries, keys = np.full((2, 32), 100, np.float32), np.full((70, 32), -60, np.float32)
    keys[41] = 60
    rows = keys.view(np.uint8)
    seen = np.array([70, 41], np.int64)
    (mass,) = check((queries, rows, "f32", seen, 32, 1.0))
    assert mass[41] == 1
    np.testing.assert_allclose(mass[:41], 1 / 41, rtol=1e-6)
    (even,) = check((queries, rows, "f32", seen, 32, 0.0))
    np.testing.assert_allclose(even, [1 / 70 + 1 / 41] * 41 + [1 / 70] * 29, rtol=1e-6)
    check((queries * -1, rows, "f32", seen, 32, 1.0))


def test_small_weights(kernels: str) -> None:
    """e^x over its whole range, down to where float32 ends."""
    n = 1000
    keys = np.linspace(0, -87, n).astype(np.float32).reshape(n, 1)
    (mass,) = dispatch.attention_mass(
        np.ones((1, 1), np.float32), keys.view(np.uint8), "f32", np.array([n]), 1, 1.0
    )
    expected = np.exp(keys[:, 0].astype(np.float64))
    np.testing.assert_allclose(mass, expected / expected.sum(), rtol=2e-6)


def test_nothing_to_do(kernels: str) -> None:
    """No queries: no mass. No keys: nothing."""
    queries, keys, name, seen, dim, scale = draw(2, 9, 4, 2, 64, "f16")
    assert not dispatch.attention_mass(queries[:0], keys, name, seen[:0], dim, scale).any()
    none = dispatch.attention_mass(queries[:0], keys[:0], name, seen[:0], dim, scale)
    assert none.shape == (2, 0)


Q, K, _, SEEN, _, _ = draw(3, 10, 4, 2, 32, "f16")
GOOD = {"queries": Q, "keys": K, "format": "f16", "n_seen": SEEN, "head_dim": 32, "scale": 0.5}


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0", "iq4_nl"])
def test_quantized_keys_are_the_numbers_they_stand_for(kernels: str, name: str) -> None:
    queries, keys, _, n_seen, dim, scale = draw(5, 70, 4, 2, 64, name)
    plain = decode(BY_NAME[name], keys).view(np.uint8)
    expected = masses((queries, plain, "f32", n_seen, dim, scale), 1)
    assert np.array_equal(masses((queries, keys, name, n_seen, dim, scale), 2), expected)
    infinite = keys.copy()
    infinite[3, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ValueError, match="keys: row 3 is not finite"):
        masses((queries, infinite, name, n_seen, dim, scale), 1)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "queries flat": ("queries", {"queries": Q[0]}),
    "queries doubles": ("queries", {"queries": Q.astype(np.float64)}),
    "queries strided": ("queries", {"queries": Q[:, ::2]}),
    "queries backwards": ("queries", {"queries": Q[::-1]}),
    "queries none": ("queries", {"queries": None}),
    "queries empty": ("queries", {"queries": Q[:, :0]}),
    "queries cut": ("queries", {"queries": Q[:, :120]}),
    "heads do not fit": ("queries", {"queries": Q[:, :96]}),
    "fewer heads than keys have": ("queries", {"queries": Q[:, :32]}),
    "queries beside their place": (
        "queries",
        {"queries": at_odd_address(Q.view(np.uint8), 4).view(np.float32)},
    ),
    "keys flat": ("keys", {"keys": K[0]}),
    "keys halves": ("keys", {"keys": K.view(np.float16)}),
    "keys cut": ("keys", {"keys": K[:, :126]}),
    "keys half an element": ("keys", {"keys": K[:, :63]}),
    "keys empty": ("keys", {"keys": K[:, :0]}),
    "keys of no heads": ("keys", {"keys": K[:, :32]}),
    "format": ("format", {"format": "F16"}),
    "format id": ("format", {"format": 1}),
    "format of no cache": ("format", {"format": "q8h"}),
    "heads in part of a block": ("format", {"format": "q8_0", "head_dim": 16}),
    "n_seen none": ("n_seen", {"n_seen": None}),
    "n_seen zero": ("n_seen", {"n_seen": SEEN * 0}),
    "n_seen beyond": ("n_seen", {"n_seen": SEEN * 0 + 11}),
    "n_seen huge": ("n_seen", {"n_seen": SEEN * 0 + 2**62}),
    "n_seen negative": ("n_seen", {"n_seen": SEEN * 0 - 1}),
    "n_seen short": ("n_seen", {"n_seen": SEEN[:2]}),
    "n_seen int32": ("n_seen", {"n_seen": SEEN.astype(np.int32)}),
    "n_seen strided": ("n_seen", {"n_seen": np.repeat(SEEN, 2)[::2]}),
    "no keys": ("n_seen", {"keys": K[:0]}),
    "head_dim zero": ("head_dim", {"head_dim": 0}),
    "head_dim large": ("head_dim", {"head_dim": 1025}),
    "head_dim text": ("head_dim", {"head_dim": "32"}),
    "head_dim other": ("queries", {"head_dim": 33}),
    "scale nan": ("scale", {"scale": math.nan}),
    "scale infinite": ("scale", {"scale": -math.inf}),
    "scale beyond float32": ("scale", {"scale": 1e39}),
    "scale none": ("scale", {"scale": None}),
    "scale int": ("scale", {"scale": 1}),
    "no threads": ("n_threads", {"n_threads": 0}),
    "threads": ("n_threads", {"n_threads": 1025}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(kernels: str, name: str) -> None:
    """Every bad argument is named."""
    argument, changed = BAD[name]
    with pytest.raises(ValueError, match=f"^{argument}(: |$)"):
        dispatch.attention_mass(**{**GOOD, **changed})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(kernels: str, value: float) -> None:
    """The first such row is named, of queries and of keys, even of keys that no query sees."""
    for row, column in ((0, 0), (1, 127), (2, 64)):
        queries = Q.copy()
        queries[row:, column] = value
        with pytest.raises(ValueError, match=rf"^queries: row {row} is not finite$"):
            dispatch.attention_mass(**{**GOOD, "queries": queries})
    for row, column in ((0, 63), (5, 0), (9, 32)):
        keys = K.copy().view(np.float16)
        keys[row, column] = value
        keys[9, 1] = value
        with pytest.raises(ValueError, match=rf"^keys: row {row} is not finite$"):
            dispatch.attention_mass(**{**GOOD, "keys": keys.view(np.uint8)})


def test_scores_beyond_float32(kernels: str) -> None:
    """Finite rows whose product is not; where it is not seen, it does not matter."""
    keys = np.ones((4, 64), np.float32)
    keys[3] = 1e30
    queries = np.full((1, 64), 1e20, np.float32)
    for scale in (1.0, -1.0, 1e-20):
        arguments = (keys.view(np.uint8), "f32", np.array([4]), 32, scale)
        with pytest.raises(ValueError, match="^queries: a score is beyond what float32 holds$"):
            dispatch.attention_mass(queries, *arguments)
        check((queries, keys.view(np.uint8), "f32", np.array([3]), 32, scale))
