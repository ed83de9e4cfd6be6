"""Long commands say where they are, and quick benchmarks how long they take."""

from __future__ import annotations

import threading

import pytest

from towerd.cli.bench.harness.work import QUICK_S_MAX, QUICK_WORK
from towerd.cli.bench.longchat import perplexity, policies
from towerd.cli.progress import Lines
from towerd.tokens import ids_array


@pytest.mark.parametrize("name", QUICK_WORK)
def test_quick_benchmarks_end_in_time(name: str) -> None:
    assert QUICK_WORK[name].seconds <= QUICK_S_MAX


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
