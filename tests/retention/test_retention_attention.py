"""Attention mass against its definition, one weight at a time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerd.retention import Rows, open_retention, retention_config
from towerd.retention.attention import attention_mass
from towerd.settings.config import RETENTIONS, UNBOUNDED, WATCHING


def rows_of(keys: Rows) -> list[npt.NDArray[np.uint8]]:
    """float32[layers, n, KV heads, head size] as cached rows of each layer."""
    return [layer.reshape(layer.shape[0], -1).view(np.uint8) for layer in map(np.copy, keys)]


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_mass_is_the_sum_of_softmaxes(
    seed: int, layers: int, n_kv: int, group: int, m: int, n: int
) -> None:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(layers, n_kv * group, m, 4)).astype(np.float32)
    k = rng.normal(size=(layers, n, n_kv, 4)).astype(np.float32)
    key_places = np.sort(rng.choice(30, n, replace=False)).astype(np.int64)
    query_places = rng.integers(key_places[0], 31, m).astype(np.int64)
    expected = np.zeros((layers, n_kv, n))
    for layer in range(layers):
        for h in range(n_kv * group):
            for i in range(m):
                seen = [j for j in range(n) if key_places[j] <= query_places[i]]
                dots = [float(q[layer, h, i] @ k[layer, j, h // group]) * 0.5 for j in seen]
                top = max(dots)
                total = sum(math.exp(dot - top) for dot in dots)
                for j, dot in zip(seen, dots, strict=True):
                    expected[layer, h // group, j] += math.exp(dot - top) / total / group
    found = attention_mass(
        q.transpose(0, 2, 1, 3), rows_of(k), "f32", query_places, key_places, 0.5
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found.sum(axis=2), m, rtol=1e-4)


def test_what_does_not_fit() -> None:
    q, k = np.zeros((1, 2, 4, 8), np.float32), np.zeros((1, 3, 2, 8), np.float32)
    places = np.arange(3)
    for bad_q, bad_k in ((q[:, :, :3], k), (q, k[..., :5]), (q, k[:0]), (q, k[:, :2])):
        with pytest.raises(ValueError, match="^(queries|keys): "):
            attention_mass(bad_q, rows_of(bad_k), "f32", places[1:], places, 1.0)
    with pytest.raises(ValueError, match="^query_places: "):
        attention_mass(q, rows_of(k), "f32", places, places, 1.0)
    with pytest.raises(ValueError, match="^key_places: "):
        attention_mass(q, rows_of(k), "f32", places[1:], places[::-1], 1.0)
    with pytest.raises(ValueError, match="^n_seen: "):
        attention_mass(q, rows_of(k), "f32", places[1:], places + 2, 1.0)


def test_the_settings_know_which_policies_watch() -> None:
    """A policy is offered only if the engine has its signals."""
    for name in RETENTIONS:
        if name not in UNBOUNDED:
            assert (name in WATCHING) == bool(open_retention(retention_config(name, 256)).signals)
