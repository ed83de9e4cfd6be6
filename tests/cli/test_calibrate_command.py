"""towerctl calibrate and bench quality, as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from daemon import Daemon

from towerd.tiers.formats.calibration import BOUNDS, Calibration


def test_calibrate_without_and_with_a_daemon(
    server: Daemon, ctl: Callable[..., Result], ctl_json: Callable[..., Any]
) -> None:
    place = ("--socket", server.socket)
    found = ctl_json("calibrate", *place)
    calibration = Calibration.from_json(found["calibration"])
    assert found["state"] == "done"
    near = calibration.choices["near"].levels
    assert found["level_formats"] == ",".join(f"{i}={name}" for i, name in enumerate(near))
    shown = ctl("calibrate", "--fidelity", "small", *place).stdout
    lines = {line.split(" ")[1]: line for line in shown.splitlines() if line.startswith(" ")}
    floor, cost = calibration.floor, calibration.choices["small"].cost
    assert float(lines["as"].split()[5]) == pytest.approx(floor.kl, rel=0.5)
    assert f"{cost.excess:+.5f} ± {cost.ci:.5f}" in lines["small"]
    assert f"{calibration.choices['small'].bits:.2f}" in lines["small"]
    assert "0.02" in lines["small"]
    assert {"small", "q4h", "q8h"} <= set(lines)
    assert "near" not in lines
    server.stop()
    stored = ctl_json("calibrate", "--store-dir", server.store_dir)
    assert stored["calibration"] == found["calibration"]
    assert stored["why"] == "no daemon runs"


def test_calibrate_loads_the_model_when_nothing_is_known(
    ctl: Callable[..., Result], tmp_path: Path
) -> None:
    result = ctl("calibrate", "--store-dir", tmp_path / "store")
    assert "loading the default model" in result.stderr
    assert "0=" in result.stdout


def test_bench_quality(
    ctl: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TOWERD_THREADS", "1")
    plot = tmp_path / "q.svg"
    result = ctl("bench", "quality", "--quick", "--plot", plot)
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["bench"] == "quality"
    # On so little text the intervals are wide, and `near` may take more bits than it owes.
    assert set(figures["missed"]) <= {"near_bits"}
    for name, bound in BOUNDS.items():
        assert figures[f"{name}_excess"] + figures[f"{name}_excess_ci"] <= bound
    assert figures["small_bits"] <= figures["near_bits"] <= 8.5
    assert 0 < figures["floor_kl"] < 1e-4
    assert figures["kl_near"] == pytest.approx(
        figures["near_excess"] + figures["floor_kl"], abs=1e-5
    )
    assert figures["share_under_whole_bound"] == 1.0
    assert {line["name"] for line in figures["tables"]} >= {"q4h", "q8", "q6ah"}
    assert "noise alone" in figures["tables"][0]["name"]
    assert plot.read_text().startswith("<?xml")


def test_bench_quality_refuses_bad_files(ctl: Callable[..., Result], tmp_path: Path) -> None:
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "b.txt" in ctl("bench", "quality", "--text", binary, code=1).stderr
    assert "--plot" in ctl("bench", "quality", "--plot", tmp_path / "x.pdf", code=1).stderr
    short = tmp_path / "s.txt"
    short.write_text("Once upon a time.")
    assert "261 tokens" in ctl("bench", "quality", "--text", short, code=1).stderr
