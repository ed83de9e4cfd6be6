"""Long commands say where they are, and quick benchmarks how long they take."""

from __future__ import annotations

import threading

import click
import pytest

from lab.bench import commands, daemon_commands
from lab.bench.longchat import beyond, perplexity, policies
from lab.bench.longchat.perplexity import ReadText
from lab.bench.longchat.reading import counts_all
from lab.bench.work import OF_FILES, QUICK_WORK
from towerd.cli.bench.harness.work import QUICK_S_MAX, RESUME_WORK, SWITCH_WORK, Work
from towerd.cli.lab import BENCHMARKS
from towerd.cli.progress import Lines
from towerd.tokens import ids_array

COMMANDS = dict(commands.bench.commands)
COMMANDS |= {name: getattr(daemon_commands, name) for name in BENCHMARKS}


@pytest.mark.parametrize("work", [RESUME_WORK, SWITCH_WORK, *QUICK_WORK.values()])
def test_quick_benchmarks_end_in_time(work: Work) -> None:
    assert work.seconds <= QUICK_S_MAX


@pytest.mark.parametrize("name", COMMANDS)
def test_each_quick_benchmark_has_an_estimate(name: str) -> None:
    """Except for one that reads files which the user names."""
    command: click.Command = COMMANDS[name]
    assert any(option.name == "quick" for option in command.params)
    assert command.callback is not None
    runs = [each for each in command.callback.__code__.co_consts if isinstance(each, str)]
    assert set(runs) & {*QUICK_WORK, *OF_FILES}


def test_what_has_no_estimate_reads_files() -> None:
    for name in OF_FILES:
        short = {"policy.hit_rates": "policy", "codec.sizes": "codec"}.get(name, name.split(".")[1])
        command = commands.bench.commands[short]
        assert {option.name for option in command.params} & {"data", "workflows"}


def test_the_work_of_longchat_is_what_it_does() -> None:
    """At least the text, the document and the chats that it reads, and the tokens that it counts for its
    progress."""
    sizes, work = policies.QUICK, QUICK_WORK["longchat.policies"]
    lives = policies.lives(sizes.budgets)
    text = ReadText(
        "text", "prompt", ids_array(bytes(4 * (sizes.prompt + sizes.reply))), sizes.prompt
    )
    n_written = perplexity.n_read([text], lives)
    (n_document,) = sizes.documents
    n_anew = sizes.prompt * (1 + sum(map(counts_all, filter(text.fits, lives))))
    n_chats = 2 * beyond.CONTEXTS * sizes.context
    assert n_anew + n_document + n_chats <= work.read
    assert n_written <= work.written


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
