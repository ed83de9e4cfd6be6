"""Moved rows equal a fresh decode at their new position, for every kind of RoPE and of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from roped import HYBRIDS, SHAPES, WINDOWED, Roped, keys_of, relative, some_ids, values_of

from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import shift

Open = Callable[..., Roped]
N = 64
RMS_OF = {"f32": 1e-4, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.0135, "q4_0": 0.2}
"""RMS of what three roundings (before, after, and the fresh decode's own) leave, relative to the
keys' own: 16-bit floats half a unit in the last place; quantized, about half a step.
In float32 what is left comes from the float32 angles."""
MAX_OF = {"f32": 3e-4, "f16": 2**-10, "bf16": 2**-7, "q8_0": 2 / 127, "q4_0": 2 / 8}
"""The largest of them, relative to the largest key: two roundings that point the same way."""
STATE = 1.5
"""From the second layer on the hidden states differ too: llama.cpp rounds them in another way at
every position. How much is seen in what does not rotate; keys may differ so much more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roped")


@pytest.fixture
def open_model(folder: Path) -> Iterator[Open]:
    opened: list[Roped] = []

    def open_(name: str, k: str = "f16", **settings: float) -> Roped:
        opened.append(Roped(folder, name, k, **settings))
        return opened[-1]

    yield open_
    for model in opened:
        model.close()


def check_same(moved: KVRows, fresh: KVRows, k: str, rope: Rope) -> None:
    """Every key of every layer within what rounding leaves."""
    assert np.array_equal(moved.positions, fresh.positions)
    assert (moved.ext is None) == (fresh.ext is None)
    if moved.ext is not None and fresh.ext is not None:
        assert np.array_equal(moved.ext, fresh.ext)
    states = []
    for i in range(fresh.layout.n_layer):
        expected = keys_of(fresh, i)
        rms, largest = relative(keys_of(moved, i) - expected, expected)
        state_rms, state_largest = unrotated(moved, fresh, i, rope)
        states.append(state_largest)
        assert rms <= RMS_OF[k] + STATE * state_rms, f"layer {i}: RMS {rms:.2e}"
        assert largest <= MAX_OF[k] + STATE * state_largest, f"layer {i}: largest {largest:.2e}"
    assert min(states) == 0.0  # the first layer's, wherever the cache has it


def unrotated(moved: KVRows, fresh: KVRows, i: int, rope: Rope) -> tuple[float, float]:
    """By how much the rows differ in V or, for MLA, in the part of K that does not rotate."""
    if fresh.layout.v:
        plane = fresh.layout.v[i]
        mine, theirs = values_of(plane, moved.v[i]), values_of(plane, fresh.v[i])
    else:
        first = rope.layers[i].first
        mine, theirs = keys_of(moved, i)[:, :first], keys_of(fresh, i)[:, :first]
    return relative(mine - theirs, theirs)


@pytest.mark.parametrize(
    ("name", "k"), [*product(SHAPES, RMS_OF), *product([*HYBRIDS, *WINDOWED], ("f16",))]
)
def test_moved_is_fresh(open_model: Open, name: str, k: str) -> None:
    """Forwards and backwards; a run that begins a sequence, so that its context is the same."""
    model = open_model(name, k)
    ids = some_ids(N)
    low, high = model.fresh(ids, 100).rows, model.fresh(ids, 1500).rows
    check_same(shift(low, 1500, model.rope, rot_k=model.rot_k), high, k, model.rope)
    check_same(shift(high, 100, model.rope, rot_k=model.rot_k), low, k, model.rope)


@pytest.mark.parametrize("name", ["llama", "yarn", "llama3", "phi3-long", "smollm3", "qwen3vl"])
@pytest.mark.parametrize("at", [16_000, 131_000])
def test_far_away(open_model: Open, name: str, at: int) -> None:
    """Where float32 angles are off by more than f16's rounding, rows land where llama.cpp's do."""
    model = open_model(name)
    ids = some_ids(N)
    near, far = model.fresh(ids, 0).rows, model.fresh(ids, at).rows
    check_same(shift(near, at, model.rope), far, "f16", model.rope)
    check_same(shift(far, 0, model.rope), near, "f16", model.rope)


@pytest.mark.parametrize("name", [*SHAPES, *WINDOWED])
def test_next_token_after_a_move(open_model: Open, name: str) -> None:
    """The logits after moved rows are those of a context that was always there; the same rows
    under new positions but with their old keys give others."""
    model = open_model(name)
    ids, more = some_ids(N), some_ids(8, 1)
    rows = model.fresh(ids, 0).rows
    expected = model.fresh(np.concatenate([ids, more]), 700).logits
    scale = float(np.std(expected))
    moved = shift(rows, 700, model.rope)
    logits = model.continued([moved], more).logits
    assert float(np.abs(logits - expected).max()) <= 0.01 * scale
    old_keys = KVRows(rows.layout, moved.positions, rows.k, rows.v, moved.ext)
    wrong = model.continued([old_keys], more).logits
    assert float(np.abs(wrong - expected).max()) >= 0.1 * scale


def test_overrides_of_the_context(open_model: Open) -> None:
    """Frequencies given on the command line are those in force."""
    plain = open_model("llama")
    model = open_model("llama", rope_freq_base=40000.0, rope_freq_scale=0.5)
    ids = some_ids(N)
    low, high = model.fresh(ids, 0).rows, model.fresh(ids, 900).rows
    check_same(shift(low, 900, model.rope), high, "f16", model.rope)
    with pytest.raises(AssertionError):
        check_same(shift(low, 900, plain.rope), high, "f16", model.rope)


def test_wrong_rope_is_noticed(open_model: Open) -> None:
    """This oracle can tell the long factors from the short ones, and YaRN from none."""
    ids = some_ids(N)
    for name, other in (("phi3-long", "phi3-short"), ("yarn", "llama"), ("llama3", "llama")):
        model = open_model(name)
        low, high = model.fresh(ids, 0).rows, model.fresh(ids, 300).rows
        check_same(shift(low, 300, model.rope), high, "f16", model.rope)
        with pytest.raises(AssertionError):
            check_same(shift(low, 300, open_model(other).rope), high, "f16", model.rope)


@pytest.mark.parametrize("name", ["gemma3-listed", "cohere2", "olmo2-windowed"])
def test_wrong_order_of_layers_is_noticed(open_model: Open, name: str) -> None:
    """The layers of the window's cache come second, whatever their place in the model."""
    model = open_model(name)
    ids = some_ids(N)
    low, high = model.fresh(ids, 0).rows, model.fresh(ids, 300).rows
    n_full = len(model.rope.layers) - model.rope.n_window
    layers = (*model.rope.layers[n_full:], *model.rope.layers[:n_full])
    moved = shift(low, 300, Rope(layers, model.rope.n_window))
    with pytest.raises(AssertionError):
        check_same(moved, high, "f16", model.rope)
