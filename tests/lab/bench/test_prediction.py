"""What predicts stored rows, on rows whose causes are known."""

from __future__ import annotations

import numpy as np

from lab.bench.prediction.gains import measure
from lab.bench.prediction.predictors import TokenMeans
from lab.bench.prediction.rows import TextRows
from towerd.cli.bench.harness.report import Report
from towerd.models.bundled import bundled_model
from towerd.slots.layout import KVLayout, Plane

LAYERS, WIDTH, TOKENS = 5, 32, 40
LAYOUT = KVLayout((Plane(1, 2 * WIDTH),) * LAYERS, (Plane(1, 2 * WIDTH),) * LAYERS)


def text_rows(n: int, seed: int) -> TextRows:
    """Keys are half of the token and half noise, each layer's noise its own; values follow those of the row
    before, which tells three quarters of their variance."""
    table = np.random.default_rng(0).normal(size=(TOKENS, WIDTH))
    random = np.random.default_rng(seed)
    said = random.integers(0, TOKENS, n + 3)
    ids = np.stack([said[3 - k : len(said) - k] for k in range(4)], 1).astype(np.int32)
    keys = [table[ids[:, 0]] + random.normal(size=(n, WIDTH)) for _ in range(LAYERS)]
    values = []
    for _ in range(LAYERS):
        value = random.normal(size=(n, WIDTH))
        for i in range(1, n):
            value[i] = 0.75**0.5 * value[i - 1] + 0.5 * value[i]
        values.append(value)
    planes = tuple(each.astype(np.float16) for each in (*keys, *values))
    return TextRows(LAYOUT, ids, planes, np.arange(n) > 0)


def test_each_cause_is_found() -> None:
    report = Report("prediction", "synthetic")
    measure(report, bundled_model(), text_rows(2400, 1), text_rows(600, 2))
    found = report.figures
    assert abs(found["v_before_bits"] - 1.0) < 0.1  # half of the logarithm of 4
    assert abs(found["k_before_bits"]) < 0.05
    assert abs(found["k_1_below_bits"] - 0.5 * np.log2(2 / 1.5)) < 0.05
    assert abs(found["first_k_token_explained"] - 0.5) < 0.05
    assert found["first_k_decoder_explained"] > found["first_v_decoder_explained"]
    assert found["first_v_token_explained"] < 0.05
    assert found["tokens_with_a_mean"] == 1
    assert abs(found["first_layer_share_near"] - 1 / LAYERS) < 0.05


def test_means_of_pairs_begin_with_those_of_tokens() -> None:
    """A pair that was never seen has its token's mean, and a token that was never seen that of all."""
    ids = np.array([[1, 2], [1, 2], [1, 3], [4, 1]], np.int32)
    values = np.array([[1.0], [3.0], [8.0], [20.0]], np.float32)
    of_tokens, of_pairs = (TokenMeans(ids, values, n) for n in (1, 2))
    asked = np.array([[1, 9], [9, 9], [1, 2]], np.int32)
    everything = 8.0
    one = everything + (12.0 - 3 * everything) / 4
    assert of_tokens.predict(asked).ravel().tolist() == [one, everything, one]
    pair = one + (4.0 - 2 * one) / 3
    assert np.allclose(of_pairs.predict(asked).ravel(), [one, everything, pair])
    assert of_pairs.known(asked).tolist() == [False, False, True]
