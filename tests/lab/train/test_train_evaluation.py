from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lab.train.data.corpus import DevText
from lab.train.data.form import ROLES
from lab.train.data.manifest import TextSource
from lab.train.evaluation.bits_per_byte import evaluate, token_costs
from lab.train.model.network import NetworkShape, Weights, init_weights, logits

SHAPE = NetworkShape(50, n_embd=16, n_layer=2, n_head=2, n_ff=16, n_ctx=12)


@pytest.fixture(scope="module")
def weights() -> Weights:
    chance = torch.Generator().manual_seed(1)
    made = init_weights(SHAPE, 0)
    return {
        name: w.detach() + 0.3 * torch.randn(w.shape, generator=chance) for name, w in made.items()
    }


def slow_costs(weights: Weights, ids: np.ndarray, stride: int) -> list[float]:
    """Each token on its own, with the context that the window rule gives it."""
    found = []
    for i in range(1, len(ids)):
        past_first = i - SHAPE.n_ctx
        window = 0 if past_first <= 0 else -(-past_first // stride) * stride
        context = torch.from_numpy(ids[window:i].astype(np.int64))[None]
        assert context.shape[1] <= SHAPE.n_ctx
        with torch.no_grad():
            log_p = logits(weights, SHAPE, context)[0, -1].log_softmax(-1)
        found.append(-float(log_p[int(ids[i])]))
    return found


@pytest.mark.parametrize("stride", [1, 5, 6, 12])
@pytest.mark.parametrize("n", [1, 2, 12, 13, 14, 18, 19, 60])
def test_costs_against_token_by_token(weights: Weights, n: int, stride: int) -> None:
    ids = np.random.default_rng(n).integers(0, 50, n).astype(np.uint32)
    found = token_costs(weights, SHAPE, ids, stride)
    np.testing.assert_allclose(found, slow_costs(weights, ids, stride), rtol=1e-4)


def dev_text(n: int) -> DevText:
    chance = np.random.default_rng(3)
    marks = chance.integers(0, 2, n).astype(np.uint8)
    return DevText(chance.integers(0, 50, n).astype(np.uint32), marks, (100, 300, 0, 0))


def test_bits_by_role_add_up(weights: Weights) -> None:
    text = dev_text(80)
    found = evaluate(weights, SHAPE, {"a": text}, n_tokens_max=1000)
    bits = token_costs(weights, SHAPE, text.ids) / math.log(2)
    for mark, role in enumerate(ROLES[:2]):
        assert found.costs["a"][role].bits == pytest.approx(bits[text.marks[1:] == mark].sum())
        assert found.costs["a"][role].n_bytes == text.bytes_of_role[mark]
    assert found.total().per_byte == pytest.approx(bits.sum() / 400)


def test_part_of_a_text_is_charged_in_proportion(weights: Weights) -> None:
    found = evaluate(weights, SHAPE, {"a": dev_text(80)}, n_tokens_max=40)
    assert 150 < found.total().n_bytes < 250


def test_table(weights: Weights) -> None:
    manifest = {name: TextSource("o", "MIT", kind, 1.0) for name, kind in (("a", "x"), ("b", "y"))}
    found = evaluate(weights, SHAPE, {"a": dev_text(80), "b": dev_text(50)}, n_tokens_max=1000)
    table = found.table(manifest)
    assert set(table["kinds"]) == {"x", "y"}
    assert set(table["roles"]) == {"user", "assistant"}
    assert table["kinds"]["x"] == table["sources"]["a"]["all"]
    low, high = sorted(table["kinds"].values())
    assert low <= table["all"] <= high
