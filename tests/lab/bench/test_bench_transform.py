"""`towerctl bench transform` on the bundled story model: what it tells of a basis, and what must hold of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from lab.bench.quality.formats import measurer_on
from lab.bench.transform import rates
from lab.bench.transform.rates import TransformReport, texts
from towerd.cli.bench.harness.report import Report
from towerd.codec.rows.learn import Rounding, groups_of, learn
from towerd.engine.embedded.calibration.transform_basis import sandwiched, windows_of
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model
from towerd.slots.rope import LayerRope, Rope
from towerd.tiers.shrink import SINKS, TAIL


@pytest.fixture(scope="module")
def report() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOWERD_THREADS", "1")
        patch.setattr(rates, "QUICK", rates.BenchSize(2, 1, 3, (0.15, 0.65)))
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
    assert {"bits_near", "bits_small", "ratio_near", "ratio_small"} <= set(report.targets)
    assert report.figures["basis_mb"] < 0.5
    assert report.figures["decode_near_mb_s"] > 0


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


def test_a_text_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="x"):
        texts(tmp_path / "x", None)
