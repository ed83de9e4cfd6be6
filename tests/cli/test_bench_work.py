"""Long commands say where they are, and quick benchmarks how long they take."""

from __future__ import annotations

import re
import threading

import click
import pytest

from lab.bench.commands import bench as lab_bench
from towerd.cli.bench.commands import bench
from towerd.cli.bench.harness.work import OF_FILES, QUICK_S_MAX, QUICK_WORK
from towerd.cli.bench.longchat import perplexity, policies
from towerd.cli.progress import Lines
from towerd.tokens import ids_array


@pytest.mark.parametrize("name", QUICK_WORK)
def test_quick_benchmarks_end_in_time(name: str) -> None:
    assert QUICK_WORK[name].seconds <= QUICK_S_MAX


@pytest.mark.parametrize(("group", "prefix"), [(bench, "bench"), (lab_bench, "lab.bench")])
def test_each_quick_benchmark_has_an_estimate(group: click.Group, prefix: str) -> None:
    """Except for one that reads files which the user names."""
    known = [*QUICK_WORK, *OF_FILES]
    for name, command in group.commands.items():
        if any(option.name == "quick" for option in command.params):
            assert command.callback is not None
            runs = [
                f"{prefix}.{each}"
                for each in command.callback.__code__.co_consts
                if isinstance(each, str) and re.fullmatch(r"[a-z_.]+", each)
            ]
            assert set(runs) & set(known), name


def test_what_has_no_estimate_reads_files() -> None:
    for name in OF_FILES:
        short = name.split(".")[3] if name.endswith(("sizes", "unseen")) else "policy"
        command = lab_bench.commands["codec" if short == "sizes" else short]
        assert any(option.name == "data" for option in command.params)


def test_the_work_of_longchat_is_what_it_reads() -> None:
    """Its perplexities and questions, as it counts them for its progress."""
    texts = {"text": ids_array(bytes(4 * policies.QUICK_TEXT_TOKENS))}
    n_read = perplexity.n_tokens(texts, policies.POLICIES, policies.QUICK_BUDGETS)
    n_read += policies.QUICK_TEXT_TOKENS
    (n,) = policies.QUICK_LENGTHS
    n_questions = policies.QUICK_FACTS * (1 + len(policies.POLICIES) * len(policies.QUICK_BUDGETS))
    assert n_read + n_questions * n == QUICK_WORK["bench.longchat.policies"].read


def test_lines_come_while_a_step_takes_long() -> None:
    """They say how much is done, and how long the rest takes, without any call meanwhile."""
    said: list[str] = []
    enough = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) >= 6:
            enough.set()

    with Lines(say, 0.01) as lines:
        known = lines.add_task("reading", total=8)
        lines.add_task("waiting", total=None)
        lines.update(known, completed=1)
        lines.advance(known)
        assert enough.wait(60)
        lines.update(known, completed=8)
    assert any(line.startswith("reading: 25%, 0 s so far, about 0 s to go") for line in said)
    assert "waiting: 0 s so far" in said
    assert not any("100%" in line for line in said)


def test_nothing_is_said_after_the_end() -> None:
    said: list[str] = []
    with Lines(said.append, 3600) as lines:
        lines.remove_task(lines.add_task("short", total=1))
    assert said == []
