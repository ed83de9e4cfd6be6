"""Formats are measured on sliding windows and on positions of several components, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.engine.embedded.calibration.measure import Measurer
from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS, plan_measurement
from towerd.engine.embedded.calibration.scratch import Scratch
from towerd.engine.embedded.context.memory import open_memory
from towerd.slots.kind import WINDOW
from towerd.tiers.formats.calibration import uniform

SHAPE = Shape(
    4, 128, 4, 2, 64, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)


@pytest.fixture(params=["gemma3", "qwen2vl"])
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Oracle]:
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(SHAPE, arch=request.param))
    made = Oracle(path)
    yield made
    made.close()


def test_rows_are_measured_where_prefill_has_them(oracle: Oracle) -> None:
    """Over native rows that were cut out and restored step by step the distributions are those of
    one prefill of everything; over stored ones they are further off with fewer bits."""
    memory = open_memory(oracle.context, oracle.model)
    window = oracle.model.n_swa if memory.kind is WINDOW else 0
    scratch = Scratch(oracle.context, 1, cell_ext=memory.layout.cell_ext, window=window)
    ids = np.random.default_rng(3).integers(300, 448, 700).astype(np.int32)
    plan = plan_measurement(ids, bos=None, window_tokens=350, token_bytes=2048, n_continuations=2)
    measurer = Measurer(scratch, plan)
    tables = [uniform("q8h"), uniform("q4h")]
    q8, q4 = measurer.costs(tables, 2)
    for continuation in plan.continuations:
        p = continuation.p
        known = plan.windows[continuation.window][: p + NEXT_TOKENS]
        whole = oracle.logprobs(known, p)
        assert np.abs(measurer.native(continuation) - whole).max() < 0.01
    assert measurer.floor(2).kl < 1e-4
    assert 0 < q8.kl < q4.kl
