"""`towerctl lab` and `towerctl bench` in a checkout and without one."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from towerd.cli.bench.bench import TABLE, Benchmarks
from towerd.cli.lab import BENCHMARKS, LAB_COMMANDS, Laboratory
from towerd.cli.main import towerctl


def test_a_checkout_has_all_its_commands() -> None:
    result = CliRunner().invoke(towerctl, ["lab", "--help"])
    assert result.exit_code == 0
    assert all(f"\n  {name}" in result.output for name in LAB_COMMANDS)


@pytest.mark.parametrize("args", [["lab"], ["lab", "--help"], ["lab", "replay", "x"]])
def test_without_a_checkout_one_sentence_says_so(tmp_path: Path, args: list[str]) -> None:
    group = click.Group("towerctl")
    group.add_command(Laboratory("lab", table=LAB_COMMANDS, checkout=tmp_path))
    result = CliRunner().invoke(group, args)
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert "works in a checkout" in result.output


def test_bench_keeps_every_name() -> None:
    result = CliRunner().invoke(towerctl, ["bench", "--help"])
    assert result.exit_code == 0
    assert all(f"\n  {name}" in result.output for name in (*TABLE, *BENCHMARKS))


def test_without_a_checkout_bench_says_where_the_rest_is(tmp_path: Path) -> None:
    group = click.Group("towerctl")
    group.add_command(Benchmarks("bench", table=TABLE | BENCHMARKS, checkout=tmp_path))
    runner = CliRunner()
    listed = runner.invoke(group, ["bench", "--help"]).output
    assert "\n  resume" in listed
    assert "\n  memory" not in listed
    result = runner.invoke(group, ["bench", "memory", "--quick"])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert "needs a checkout" in result.output
    assert runner.invoke(group, ["bench", "nothing"]).exit_code == 2
