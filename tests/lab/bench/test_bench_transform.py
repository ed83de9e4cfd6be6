"""`towerctl bench transform` on the bundled story model: what it tells of a basis, and what must hold of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lab.bench.quality.formats import context_on, measurer_on
from lab.bench.transform import rates, wide
from lab.bench.transform.rates import TransformReport, texts
from lab.bench.transform.resume import repeated, resume_times
from towerd.cli.bench.harness.report import Report
from towerd.codec.rows.learn import Rounding, groups_of, learn
from towerd.engine.embedded.calibration.transform_basis import sandwiched, windows_of
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows
from towerd.tiers.shrink import SINKS, TAIL


@pytest.fixture(scope="module")
def report() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOWERD_THREADS", "1")
        patch.setattr(rates, "QUICK", rates.BenchSize(2, 1, 3, (0.15, 0.65), 1.0, (64, 200), 0))
        return asyncio.run(rates.run(bundled_model(), True))


def test_fewer_bits_drift_more(report: Report) -> None:
    assert isinstance(report, TransformReport)
    lines = {line["name"]: line for line in report.codings}
    steps = [line for name, line in lines.items() if name.startswith("step")]
    bits = [line["bits"] for line in steps]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 2.5 < bits[0] < lines["q4h"]["bits"]
    assert steps[0]["kl"] < steps[-1]["kl"]
    assert steps[0]["kl"] < lines["q4h"]["kl"]


def test_what_owes_a_target_says_so(report: Report) -> None:
    ratios = {f"ratio_{name}_{n}" for name in ("near", "small") for n in (64, 200)}
    assert {"bits_near", "bits_small", "ratio", *ratios} <= set(report.targets)
    assert report.figures["basis_mb"] < 0.5
    for key in ("encode_near_mb_s", "decode_near_mb_s", "prefill_200_s", "ratio_q4h_200"):
        assert report.figures[key] > 0
    assert json.loads(json.dumps(report.as_json()))["codings"]


def test_rows_are_brought_back_in_turns_with_evaluating() -> None:
    """Each batch of tokens is evaluated once and its rows are read once by each reader, in order."""
    asked: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    readers = {name: lambda p0, p1, to=to: to.append((p0, p1)) for name, to in asked.items()}
    with context_on(bundled_model(), 300) as (context, _):
        ids = np.arange(50, dtype=np.int32)
        times = resume_times(context, ids, readers, (40, 200))
    assert [each.n_tokens for each in times] == [40, 200]
    assert times[0].prefill_s < times[1].prefill_s
    for found in asked.values():
        assert found[0] == (0, 40)  # before the clock starts
        assert [p0 for p0, _ in found[1:]] == [0, *[p1 for _, p1 in found[1:-1]]]
        assert found[-1][1] == 200


def test_a_models_rows_are_repeated() -> None:
    layout = KVLayout((Plane(1, 8),), (Plane(1, 8),))
    plane = np.arange(24, dtype=np.uint8).reshape(3, 8)
    rows = KVRows(layout, np.arange(5, 8, dtype=np.int32), (plane,), (plane,))
    many = repeated(rows, 7)
    assert many.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (many.k[0] == plane[[0, 1, 2, 0, 1, 2, 0]]).all()


def test_first_and_last_rows_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWERD_THREADS", "1")
    text = texts(None, None)[0]
    with measurer_on(bundled_model(), text, 4) as measurer:
        layout = measurer.layout
        rope = Rope((LayerRope("norm", 8, 8),) * layout.n_layer)
        samples = [rows.slice(SINKS, rows.p1) for rows in windows_of(measurer)]
        basis = learn(
            samples,
            rope,
            {"fine": Rounding(0.01)},
            row_identity=b"",
            groups=groups_of(layout, layout.n_layer),
        )
        rows = windows_of(measurer)[0].token_major()
        parts = sandwiched(rows, basis, "fine", rope)
        assert [len(part) for part in parts] == [SINKS, len(rows) - SINKS - TAIL, TAIL]
        for native, part in (
            (rows.slice(0, SINKS), parts[0]),
            (rows.slice(parts[2].p0, rows.p1), parts[2]),
        ):
            assert all((a == b).all() for a, b in zip(native.planes(), part.planes(), strict=True))
        middle = rows.slice(parts[1].p0, parts[1].p1)
        for a, b in zip(middle.planes(), parts[1].planes(), strict=True):
            errors = a.view(np.float16).astype(float) - b.view(np.float16).astype(float)
            assert np.abs(errors).max() < 0.1
        asked = itertools.count()
        paused = sandwiched(rows, basis, "fine", rope, partial(next, asked))
        assert next(asked) >= len(middle) / 64  # as often as there are pages, at least
        for a, b in zip(parts[1].planes(), paused[1].planes(), strict=True):
            assert (a == b).all()


def test_the_8b_shape_is_timed_by_some_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with another model's layers and few rows."""
    monkeypatch.setenv("TOWERD_THREADS", "1")
    monkeypatch.setattr(wide, "random_model", lambda *_, **__: bundled_model())
    monkeypatch.setattr(wide, "ROWS", 64)
    monkeypatch.setattr(wide, "LAYOUT", KVLayout((Plane(1, 2048),) * 2, (Plane(1, 2048),) * 2))
    monkeypatch.setattr(wide, "LAYERS", 2)
    assert all(each > 0 for each in wide.seconds_a_token(1))


def test_a_text_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="x"):
        texts(tmp_path / "x", None)
