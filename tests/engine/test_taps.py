"""Taps: what llama.cpp's attention computes, against the same in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from towerd.engine.embedded.calibration.scratch import Scratch
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.taps import Taps
from towerd.errors import TowerdError
from towerd.model.llama_model import LlamaModel
from towerd.settings.config import Config

N = 40


@pytest.fixture
def tapped(model_path: Path) -> Iterator[tuple[Taps, Scratch]]:
    taps = Taps()
    config = Config(model=model_path, cache_type_k="f32", cache_type_v="f32", flash_attn="off")
    model = LlamaModel(model_path, config)
    context = LlamaContext(model, config, n_cells=256, n_seqs=1, taps=taps)
    yield taps, Scratch(context, 0)
    context.close()
    model.close()


def test_attention_is_what_it_says(tapped: tuple[Taps, Scratch]) -> None:
    """Weights are the softmax of queries and keys, outputs their sum over the values."""
    taps, scratch = tapped
    ids = np.random.default_rng(0).integers(260, 500, N).astype(np.int32)
    taps.watch("Qcur", "kq_soft_max", "kqv")
    found = scratch.evaluate(None, 0, ids, logits=False, rows=True)
    rows = found.rows
    assert rows is not None
    assert taps.layers == tuple(range(rows.layout.n_layer))
    for layer in taps.layers:
        out = taps.take("kqv", layer).astype(np.float64)
        weights = taps.take("kq_soft_max", layer).astype(np.float64)
        heads, _, d = out.shape
        q = taps.take("Qcur", layer).reshape(N, heads, -1).transpose(1, 0, 2).astype(np.float64)
        keys, values = (
            plane[layer].view(np.float32).reshape(N, -1, d).transpose(1, 0, 2).astype(np.float64)
            for plane in (rows.k, rows.v)
        )
        group = heads // len(keys)
        scores = q @ np.repeat(keys, group, 0).transpose(0, 2, 1) / np.sqrt(d)
        scores[:, ~np.tri(N, dtype=bool)] = -np.inf
        expected = np.exp(scores - scores.max(-1, keepdims=True))
        expected /= expected.sum(-1, keepdims=True)
        assert weights[:, :, N:].max() == 0  # cells that are padding
        np.testing.assert_allclose(weights[:, :, :N], expected, atol=1e-5)
        np.testing.assert_allclose(out, expected @ np.repeat(values, group, 0), atol=1e-4)


def test_watching_nothing_collects_nothing(tapped: tuple[Taps, Scratch]) -> None:
    taps, scratch = tapped
    ids = np.arange(260, 270, dtype=np.int32)
    plain = scratch.evaluate(None, 0, ids, logits=True, rows=False).logits
    assert not taps.layers
    taps.watch("kqv")
    watched = scratch.evaluate(None, 0, ids, logits=True, rows=False).logits
    assert taps.layers
    assert plain is not None
    assert watched is not None
    assert (plain == watched).all()


def test_missing_tensor_is_an_error(tapped: tuple[Taps, Scratch]) -> None:
    taps, scratch = tapped
    taps.watch("nothing")
    scratch.evaluate(None, 0, np.array([260], np.int32), logits=False, rows=False)
    with pytest.raises(TowerdError, match="nothing-0"):
        taps.take("nothing", 0)
