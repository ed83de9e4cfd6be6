"""Measuring tables through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.engine.embedded.calibration.calibrate import calibration_text, plan_for
from towerd.engine.embedded.calibration.measure import Measured, Measurer, log_softmax
from towerd.engine.embedded.calibration.measure_plan import (
    NEXT_TOKENS,
    PREFIX_TOKENS_MIN,
    ROWS_BYTES_MAX,
    plan_measurement,
)
from towerd.engine.embedded.calibration.scratch import Pace, Scratch
from towerd.engine.embedded.context.context import LlamaContext
from towerd.errors import TowerdError
from towerd.model.llama_model import LlamaModel
from towerd.model.vocab import Vocab
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config
from towerd.slots.layout import NATIVE
from towerd.tiers.formats.calibration import uniform

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
    plan = plan_measurement(
        bundled_ids(), bos=1, window_tokens=512, token_bytes=640, n_continuations=4
    )
    seen: list[int] = []
    scratch.evaluated = seen.append
    measurer = Measurer(scratch, plan)
    tables = [uniform(NATIVE), uniform("q8h"), uniform("q4h"), ("q4h", NATIVE, NATIVE)]
    n_expected = measurer.n_tokens([(tables, 4)])
    native, q8, q4, q4_in_level_0 = measurer.costs(tables, 4)
    assert sum(seen) == n_expected  # each is said before it is evaluated
    assert measurer.n_tokens([(tables, 4)]) == 0
    assert (native.kl, native.excess, native.ci, native.top1) == (0, 0, 0, 1)
    assert 0 < q8.kl < q4_in_level_0.kl < q4.kl < 0.2
    assert q8.kl < 0.001
    assert q8.top1 > q4.top1 > 0.7
    assert native.ppl == pytest.approx(q8.ppl, rel=0.02)
    assert 0 < measurer.floor(4).kl < 1e-4  # 32-bit weights amplify nothing
    assert q4.excess == pytest.approx(q4.kl, abs=1e-4)
    assert q4.n_tokens == 4 * NEXT_TOKENS
    assert scratch.context.pos_max(scratch.seq) == -1


def test_an_interrupted_measurement_continues(scratch: Scratch) -> None:
    """Stopped at any moment it evaluates nothing of what it has again but the text's windows, and
    finds the same."""
    plan = plan_measurement(
        bundled_ids(), bos=1, window_tokens=300, token_bytes=640, n_continuations=3
    )
    tables = [uniform("q8h"), uniform("q4h")]
    whole = Measurer(scratch, plan).costs(tables, 3)
    kept = Measured()
    seen: list[int] = []
    scratch.evaluated = seen.append
    n_whole = Measurer(scratch, plan).n_tokens([(tables, 3)])
    n_stops, found = 0, None
    while found is None:
        left = [2]  # pieces before the next stop

        def keep(measured: Measured, left: list[int] = left) -> None:
            nonlocal kept
            kept = msgspec.json.decode(msgspec.json.encode(measured), type=Measured)
            left[0] -= 1
            if not left[0]:
                raise InterruptedError

        try:
            found = Measurer(scratch, plan, measured=kept, keep=keep).costs(tables, 3)
        except InterruptedError:
            n_stops += 1
    assert n_stops == 5  # 1 for the noise's shape, and 3 pieces for each continuation
    for a, b in zip(whole, found, strict=True):
        assert (a.kl, a.excess, a.ppl) == pytest.approx((b.kl, b.excess, b.ppl))
    # for each stop: the windows of the text again, and one continuation over native rows
    n_windows = sum(plan.prefix_of(window) for window in {c.window for c in plan.continuations})
    assert sum(seen) <= n_whole + n_stops * (n_windows + NEXT_TOKENS)


def test_costs_do_not_depend_on_the_size_of_steps(scratch: Scratch) -> None:
    """A slow machine evaluates a continuation in several steps: the same up to rounding."""
    plan = plan_measurement(
        bundled_ids(), bos=1, window_tokens=300, token_bytes=640, n_continuations=2
    )
    calls: list[int] = []

    def run_step(work: Callable[[], T], n_cells: int) -> T:
        calls.append(n_cells)
        return work()

    whole = Measurer(scratch, plan)
    pieces = Measurer(scratch, plan, run_step=run_step, step_s=1e-9)
    a, b = (measurer.costs([uniform("q4h")], 2)[0] for measurer in (whole, pieces))
    assert a.kl == pytest.approx(b.kl, rel=0.2)  # codes at the edge of two
    assert a.ppl == pytest.approx(b.ppl, rel=0.01)
    assert max(calls) == plan.n_cells
    assert len(calls) > 2 * NEXT_TOKENS // 16


def test_plan_is_reproducible_and_spread() -> None:
    ids = np.arange(5000, dtype=np.int32)
    plan = plan_measurement(ids, bos=1, window_tokens=512, token_bytes=100, n_continuations=8)
    again = plan_measurement(ids, bos=1, window_tokens=512, token_bytes=100, n_continuations=8)
    assert plan.digest() == again.digest()
    assert len(plan.continuations) == 8
    assert all(len(window) <= 512 and window[0] == 1 for window in plan.windows)
    assert {c.window for c in plan.continuations} >= {0, len(plan.windows) - 1}
    assert plan.continuations[0].window == 0
    assert plan.continuations[1].window > len(plan.windows) // 3  # any beginning is spread out
    for c in plan.continuations:
        assert PREFIX_TOKENS_MIN <= c.p < len(plan.windows[c.window]) - NEXT_TOKENS
    other = plan_measurement(ids + 1, bos=1, window_tokens=512, token_bytes=100, n_continuations=8)
    assert other.digest() != plan.digest()


def test_plan_keeps_rows_within_memory() -> None:
    ids = np.arange(5000, dtype=np.int32)
    plan = plan_measurement(
        ids, bos=None, window_tokens=4096, token_bytes=ROWS_BYTES_MAX // 600, n_continuations=8
    )
    assert sum(len(window) for window in plan.windows) <= 600


@pytest.mark.parametrize(
    ("n_text", "window", "said"),
    [
        (100, 2048, "at least 261 tokens"),
        (5000, 200, "at least 261 tokens"),
        (300, 2048, "two continuations"),
    ],
)
def test_too_little_of_text_or_context_is_an_error(n_text: int, window: int, said: str) -> None:
    with pytest.raises(TowerdError, match=said):
        plan_measurement(
            np.zeros(n_text, np.int32),
            bos=None,
            window_tokens=window,
            token_bytes=100,
            n_continuations=8,
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
    one = Pace(0.25, unit=1)  # tokens that are evaluated one at a time
    assert one.n == 1
    one.learn(1, 0.05)
    assert one.n == 5
    one.learn(1, 0.25, 0.2)  # bringing the rows before takes most of it
    assert one.n == 4
    one.learn(1, 1.05, 1.0)  # and all of it
    assert one.n in (19, 20)
    small = Pace(0.25, 5)  # --batch-size 5
    assert small.n == 5
    small.learn(5, 1e-6)
    assert small.n == 5


def test_floor_is_of_the_shape_that_disturbs_most(tmp_path: Path) -> None:
    """Weights in 8 bits round activations, so that another shape gives other distributions, and
    stored rows of hardly any error as other ones: by about as much, and not by a tenth of it."""
    path = tmp_path / "q8.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], ftype="Q8_0"))
    config = Config(model=path, threads=1, flash_attn="on")
    model = LlamaModel(path, config)
    context = LlamaContext(model, config, n_cells=512, n_seqs=1)
    plan = plan_measurement(
        np.random.default_rng(1).integers(300, 500, 1500).astype(np.int32),
        bos=None,
        window_tokens=512,
        token_bytes=640,
        n_continuations=4,
    )
    measurer = Measurer(Scratch(context, 0), plan)
    floor = measurer.floor(4)
    assert floor.shape == max(floor.shapes, key=lambda name: floor.shapes[name])
    assert floor.n_tokens == 4 * NEXT_TOKENS
    assert floor.kl > 0
    assert context.n_threads == 1  # as before the shape with more threads
    (q8,) = measurer.costs([uniform("q8h")], 4)
    assert q8.kl == pytest.approx(floor.kl, rel=0.5)
    assert q8.floor_kl == pytest.approx(floor.kl)
    context.close()
    model.close()


def test_log_softmax() -> None:
    row = np.array([1.0, 2.0, 3000.0], np.float32)
    assert np.exp(log_softmax(row)).sum() == pytest.approx(1.0)


def test_any_vocabulary(tiny_model: Path) -> None:
    """A random model with another tokenizer plans and measures as well."""
    config = Config(model=tiny_model)
    model = LlamaModel(tiny_model, config)
    context = LlamaContext(model, config, n_cells=512, n_seqs=1)
    plan = plan_for(Vocab(model.ptr), calibration_text(), 512, 1024, 2)
    measurer = Measurer(Scratch(context, 0), plan)
    assert measurer.costs([uniform(NATIVE)], 2)[0].kl == 0
    context.close()
    model.close()
