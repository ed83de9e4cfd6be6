"""Angles: against the published formulas, and against llama.cpp's float32 chain."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerd.slots.errors import StateError
from towerd.slots.rope import LayerRope, Rope

PLAIN = LayerRope("norm", head_dim=128, n_rot=128)
YARN = replace(PLAIN, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=4096)
FACTORS = tuple(float(x) for x in np.linspace(1.0, 8.0, 64))
LAYERS = {
    "plain": PLAIN,
    "linear": replace(PLAIN, freq_scale=0.25),
    "yarn": YARN,
    "factors": replace(PLAIN, factors=FACTORS, freq_base=500000.0),
    "partial": replace(PLAIN, kind="neox", n_rot=32),
    "latent": replace(PLAIN, head_dim=576, n_rot=64, first=512),
    "sections": replace(PLAIN, kind="neox", sections=(16, 24, 24, 0)),
}


def test_plain_angles() -> None:
    expected = 10000.0 ** (-2 * np.arange(64) / 128)
    assert PLAIN.angles() == pytest.approx(expected, rel=1e-5)


def test_linear_scaling_and_factors() -> None:
    plain = replace(PLAIN, freq_base=500000.0).angles()
    assert LAYERS["factors"].angles() == pytest.approx(plain / FACTORS)
    assert LAYERS["linear"].angles() == pytest.approx(PLAIN.angles() / 4)


def test_yarn_interpolates_slow_pairs_only() -> None:
    """The formula of the YaRN paper: by how often a pair turns in the original context."""
    plain, yarn = PLAIN.angles(), YARN.angles()
    turns = 4096 * plain / (2 * math.pi)
    assert yarn[turns > 33] == pytest.approx(plain[turns > 33])
    assert yarn[turns < 0.9] == pytest.approx(plain[turns < 0.9] / 4)
    ratio = yarn / plain
    assert (np.diff(ratio) <= 1e-12).all()
    between = ratio[(ratio < 0.99) & (ratio > 0.26)]
    assert len(between) > 10
    assert np.diff(between) == pytest.approx(np.diff(between)[0], rel=1e-3)  # a straight ramp


def test_sections_of_text() -> None:
    """A text token is at its position in every section but the fourth, where it is at 0."""
    plain = replace(PLAIN, kind="neox").angles()
    assert LAYERS["sections"].angles() == pytest.approx(plain)
    fourth = replace(PLAIN, kind="neox", sections=(16, 16, 16, 16)).angles()
    assert fourth[:48] == pytest.approx(plain[:48])
    assert not fourth[48:].any()
    qwen3vl = replace(PLAIN, kind="neox", sections=(24, 20, 20, 0), interleaved=True).angles()
    assert np.flatnonzero(qwen3vl == 0).tolist() == [61, 62]
    qwen35 = LayerRope("neox", 256, 64, sections=(11, 11, 10, 0), interleaved=True)
    assert (qwen35.angles() > 0).all()


@pytest.mark.parametrize("name", list(LAYERS))
def test_chain_is_the_angles_but_for_rounding(name: str) -> None:
    layer = LAYERS[name]
    positions = np.array([0, 1, 77, 4096, 131072], np.int32)
    exact = np.multiply.outer(positions.astype(np.float64), layer.angles())
    error = np.abs(layer.chain(positions) - exact)
    assert layer.chain(positions).dtype == np.float32
    assert (error <= exact * 2e-5).all()
    assert error[:2].max() <= 1e-6


@given(
    st.sampled_from(sorted(LAYERS)),
    st.lists(st.integers(-200_000, 200_000), min_size=1, max_size=9),
)
def test_tables_are_rotations(name: str, deltas: list[int]) -> None:
    """Of magnitude 1, the inverse for the opposite delta, the identity for 0."""
    rope = Rope((LAYERS[name],))
    cos, sin = rope.tables(0, deltas)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (len(deltas), LAYERS[name].n_rot // 2)
    assert cos.astype(np.float64) ** 2 + sin.astype(np.float64) ** 2 == pytest.approx(1, abs=3e-7)
    back = rope.tables(0, [-delta for delta in deltas])
    assert np.array_equal(back[0], cos)
    assert np.array_equal(back[1], -sin)
    still = rope.tables(0, [0])
    assert (still[0] == 1).all()
    assert not still[1].any()


def test_rounded_tables_have_a_line_for_each_row() -> None:
    rope = Rope((PLAIN, LAYERS["latent"]))
    positions = np.array([5, 6, 90_000], np.int32)
    cos, sin = rope.rounded_tables(1, positions, 1000)
    assert cos.shape == sin.shape == (3, 32)
    exact = rope.tables(1, [1000])[0]
    assert cos == pytest.approx(np.repeat(exact, 3, axis=0), abs=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "alibi"}, "kind"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 1 << 20}, "head_dim"),
        ({"n_rot": 0}, "cannot be rotated"),
        ({"n_rot": 63}, "cannot be rotated"),
        ({"n_rot": 130}, "cannot be rotated"),
        ({"first": 2}, "cannot be rotated"),
        ({"first": -2, "n_rot": 64}, "cannot be rotated"),
        ({"freq_base": 0.0}, "freq_base"),
        ({"freq_base": math.inf}, "freq_base"),
        ({"freq_scale": -1.0}, "freq_scale"),
        ({"freq_scale": math.nan}, "freq_scale"),
        ({"ext_factor": 1.0}, "YaRN"),
        ({"ext_factor": 1.0, "n_ctx_orig": 4096, "freq_base": 1.0}, "YaRN"),
        ({"ext_factor": math.nan, "n_ctx_orig": 4096}, "YaRN"),
        ({"factors": (1.0,)}, "64 positive"),
        ({"factors": (0.0,) * 64}, "64 positive"),
        ({"sections": (0, 0, 0, 64)}, "sections"),
        ({"sections": (1, 2, 3)}, "sections"),
        ({"sections": (-1, 65, 0, 0)}, "sections"),
    ],
)
def test_impossible_layers_are_told_so(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        replace(PLAIN, **change)


def test_impossible_models_are_told_so() -> None:
    with pytest.raises(StateError, match="no layers"):
        Rope(())
    with pytest.raises(StateError, match="sections"):
        Rope((PLAIN, LAYERS["sections"]))
    assert Rope((LayerRope("none", 128), LAYERS["sections"])).is_multi
    assert not Rope((LayerRope("none", 128), PLAIN)).is_multi
