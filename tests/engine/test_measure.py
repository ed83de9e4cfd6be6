"""Measuring tables through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from towerd.config import Config
from towerd.engine.embedded.calibrate import calibration_text, plan_for
from towerd.engine.embedded.context import LlamaContext
from towerd.engine.embedded.measure import (
    NEXT_TOKENS,
    PREFIX_TOKENS_MIN,
    ROWS_BYTES_MAX,
    Measurer,
    Pace,
    Scratch,
    log_softmax,
    make_plan,
)
from towerd.engine.embedded.model import LlamaModel
from towerd.engine.embedded.vocab import Vocab
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model
from towerd.slots.layout import NATIVE
from towerd.tiers.levels import uniform

T = TypeVar("T")


@pytest.fixture(params=["on", "off"])
def scratch(request: pytest.FixtureRequest) -> Iterator[Scratch]:
    path = bundled_model()
    config = Config(model=path, flash_attn=request.param, threads=1)
    model = LlamaModel(path, config)
    context = LlamaContext(model, config, n_cells=512, n_seqs=2)
    yield Scratch(context, 1)
    context.close()
    model.close()


def bundled_ids() -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    path = bundled_model()
    model = LlamaModel(path, Config(model=path))
    try:
        return Vocab(model.ptr).tokenize(calibration_text(), False, False)
    finally:
        model.close()


def test_tables_cost_what_their_bits_let_expect(scratch: Scratch) -> None:
    plan = make_plan(bundled_ids(), bos=1, window_tokens=512, token_bytes=640, n_checkpoints=4)
    seen: list[int] = []
    measurer = Measurer(scratch, plan, progress=seen.append)
    measurer.prepare()
    tables = [uniform(NATIVE), uniform("q8h"), uniform("q4h"), ("q4h", NATIVE, NATIVE)]
    native, q8, q4, q4_in_level_0 = measurer(tables)
    assert (native.kl, native.top1) == (0, 1)
    assert 0 < q8.kl < q4_in_level_0.kl < q4.kl < 0.2
    assert q8.kl < 0.001
    assert q8.top1 > q4.top1 > 0.7
    assert native.ppl == pytest.approx(q8.ppl, rel=0.02)
    assert sum(seen[-20:]) == 20 * NEXT_TOKENS
    assert scratch.context.pos_max(scratch.seq) == -1


def test_costs_do_not_depend_on_the_size_of_steps(scratch: Scratch) -> None:
    """A slow machine evaluates a continuation in several steps: the same up to rounding."""
    plan = make_plan(bundled_ids(), bos=1, window_tokens=300, token_bytes=640, n_checkpoints=1)
    calls: list[int] = []

    def run_step(work: Callable[[], T], n_cells: int) -> T:
        calls.append(n_cells)
        return work()

    whole = Measurer(scratch, plan)
    pieces = Measurer(scratch, plan, run_step=run_step, step_s=1e-9)
    for measurer in (whole, pieces):
        measurer.prepare()
    a, b = (measurer([uniform("q4h")])[0] for measurer in (whole, pieces))
    assert a.kl == pytest.approx(b.kl, rel=0.2)  # codes at the edge of two
    assert a.ppl == pytest.approx(b.ppl, rel=0.01)
    assert max(calls) == plan.n_cells
    assert len(calls) > 2 * NEXT_TOKENS // 16


def test_plan_is_reproducible_and_spread() -> None:
    ids = np.arange(5000, dtype=np.int32)
    plan = make_plan(ids, bos=1, window_tokens=512, token_bytes=100, n_checkpoints=8)
    again = make_plan(ids, bos=1, window_tokens=512, token_bytes=100, n_checkpoints=8)
    assert plan.digest() == again.digest()
    assert plan.n_tokens == 8 * NEXT_TOKENS
    assert all(len(window) <= 512 and window[0] == 1 for window in plan.windows)
    windows = {c.window for c in plan.checkpoints}
    assert 0 in windows
    assert len(plan.windows) - 1 in windows
    for c in plan.checkpoints:
        assert PREFIX_TOKENS_MIN <= c.p < len(plan.windows[c.window]) - NEXT_TOKENS
    other = make_plan(ids + 1, bos=1, window_tokens=512, token_bytes=100, n_checkpoints=8)
    assert other.digest() != plan.digest()


def test_plan_keeps_rows_within_memory() -> None:
    ids = np.arange(5000, dtype=np.int32)
    plan = make_plan(
        ids, bos=None, window_tokens=4096, token_bytes=ROWS_BYTES_MAX // 600, n_checkpoints=8
    )
    assert sum(len(window) for window in plan.windows) <= 600


@pytest.mark.parametrize(("n_text", "window"), [(100, 2048), (5000, 200)])
def test_too_little_of_text_or_context_is_an_error(n_text: int, window: int) -> None:
    with pytest.raises(TowerdError, match="at least 261 tokens"):
        make_plan(
            np.zeros(n_text, np.int32),
            bos=None,
            window_tokens=window,
            token_bytes=100,
            n_checkpoints=8,
        )


def test_a_failed_step_leaves_nothing_behind(scratch: Scratch) -> None:
    with pytest.raises(TowerdError):
        scratch.evaluate(np.zeros(64, np.uint8), 8, np.array([5], np.int32), logits=True, rows=True)
    assert scratch.context.batch.n == 0
    assert scratch.context.pos_max(scratch.seq) == -1


def test_pace_follows_the_machine() -> None:
    pace = Pace(0.25)
    assert pace.n == 16
    pace.learn(16, 0.01)
    assert pace.n == 64
    pace.learn(64, 4.0)
    assert pace.n == 16
    small = Pace(0.25, 5)  # --batch-size 5
    assert small.n == 5
    small.learn(5, 1e-6)
    assert small.n == 5


def test_log_softmax() -> None:
    row = np.array([1.0, 2.0, 3000.0], np.float32)
    assert np.exp(log_softmax(row)).sum() == pytest.approx(1.0)


def test_any_vocabulary(tiny_model: Path) -> None:
    """A random model with another tokenizer plans and measures as well."""
    config = Config(model=tiny_model)
    model = LlamaModel(tiny_model, config)
    context = LlamaContext(model, config, n_cells=512, n_seqs=1)
    plan = plan_for(Vocab(model.ptr), calibration_text(), 512, 1024, 1)
    measurer = Measurer(Scratch(context, 0), plan)
    measurer.prepare()
    assert measurer([uniform(NATIVE)])[0].kl == 0
    context.close()
    model.close()
