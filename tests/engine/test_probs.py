from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import towerd.engine.base
from towerd.engine.embedded.model import init_backend
from towerd.engine.embedded.probs import LOGPROB_MIN, from_candidates, from_logits
from towerd.engine.embedded.vocab import Vocab

BUNDLED = Path(towerd.engine.base.__file__).parents[1] / "data" / "stories260K.gguf"


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    if not BUNDLED.exists():
        pytest.skip("the bundled model is not built")
    init_backend()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(BUNDLED).encode(), params)
    yield Vocab(model)
    lib.llama_model_free(model)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 600), scale=st.floats(0.01, 30))
def test_logits_against_a_float64_softmax(vocab: Vocab, seed: int, n: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab.n_vocab) * scale).astype(np.float32)
    wide = np.exp(logits.astype(np.float64) - logits.max())
    want = np.log(wide / wide.sum())
    chosen = int(rng.integers(vocab.n_vocab))
    got = from_logits(vocab, logits, chosen, n)
    assert got.chosen.id == chosen
    assert math.isclose(got.chosen.logprob, want[chosen], abs_tol=1e-5 * max(1, scale))
    order = np.argsort(-logits, kind="stable")[:n]
    assert [t.id for t in got.top] == order.tolist()
    np.testing.assert_allclose([t.logprob for t in got.top], want[order], atol=1e-5 * scale + 1e-5)
    assert got.top[0].piece == vocab.rendered(got.top[0].id)


def test_ties_are_ordered_by_id(vocab: Vocab) -> None:
    logits = np.zeros(vocab.n_vocab, np.float32)
    logits[[7, 3]] = 1
    assert [t.id for t in from_logits(vocab, logits, 3, 2).top] == [3, 7]


def test_forbidden_tokens_have_a_finite_logprob(vocab: Vocab) -> None:
    logits = np.full(vocab.n_vocab, -np.inf, np.float32)
    logits[5] = 2
    got = from_logits(vocab, logits, 6, 3)
    assert got.chosen.logprob == LOGPROB_MIN
    assert got.top[0].logprob == 0.0


def test_candidates_are_sorted_and_zeros_left_out(vocab: Vocab) -> None:
    ids = np.array([4, 9, 2], np.int32)
    p = np.array([0.25, 0.75, 0.0], np.float32)
    got = from_candidates(vocab, ids, p, 4, 10)
    assert [t.id for t in got.top] == [9, 4]
    assert math.isclose(math.exp(got.chosen.logprob), 0.25)
    assert from_candidates(vocab, ids, p, 2, 1).chosen.logprob == LOGPROB_MIN
