"""`towerctl lab bench splice` on the bundled model."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result


def test_bench_splice(ctl: Callable[..., Result]) -> None:
    """One JSON object on the last line; evaluating everything again loses nothing."""
    result = ctl("lab", "bench", "splice", "--quick")
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["bench"] == "splice"
    assert [line["percent"] for line in figures["drift"]] == [0, 5, 10, 15, 25, 50, 75, 100]
    assert figures["kl_100"] <= 1e-4
    assert figures["top1_100"] == 1
    assert figures["missed"] == []
    assert figures["kl_0"] > figures["kl_100"]
    assert figures["excess_0"] == pytest.approx(figures["kl_0"] - figures["floor_kl"])
    assert 0 < figures["floor_kl"] < 1e-4  # weights of 32 bits
    assert figures["percent_small"] <= figures["percent_near"]
    assert figures["tokens_compared"] == 2 * 64 * 3
