"""Pictures whose tokens share a position (M-RoPE): llama-server's words, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from daemon import Daemon, wait_until_written
from pictures import Said, answered, counts, say
from seeing import HIGH, SQUARE, WIDE, make_seeing, message

from lab.models.vision import grid
from towerd.cli.bench.harness.servers import llama_server

MakeDaemon = Callable[..., Daemon]
FLAGS = ("-c", "1024", "-t", "1", "-tb", "1", "-ctk", "f32", "-ctv", "f32", "--no-warmup")


@dataclass(frozen=True)
class Both:
    """A daemon's flags, and the URL of llama-server with the same model."""

    flags: tuple[str, ...]
    alone: str

    def say(self, daemon: Daemon, messages: list[Any]) -> Said:
        """The daemon's answer, which is llama-server's."""
        wanted, said = say(self.alone, messages), say(daemon.url, messages)
        assert (said.text, said.n_prompt) == (wanted.text, wanted.n_prompt)
        return said


@pytest.fixture(scope="module", params=["qwen3vl", "qwen35"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    model, projector = make_seeing(tmp_path_factory.mktemp("mrope"), request.param)
    flags = (*FLAGS, "--mmproj", str(projector))
    with llama_server(model, *flags, "-np", "1") as alone:
        more = ("--checkpoint-tokens", "32", "--no-anticipate")
        yield Both(("-m", str(model), *flags, *more), alone.url)


def test_a_picture_is_seen_once(make_daemon: MakeDaemon, both: Both) -> None:
    """Before and behind words, several in a history, of other sizes: after kill -9 and after a stop, none
    is encoded or evaluated again."""
    chat: list[Any] = [message("one two three " * 4, (1, WIDE), "What is this?")]
    with make_daemon(*both.flags) as daemon:
        first = both.say(daemon, chat)
        assert first.n_prompt > grid(*WIDE)[0] * grid(*WIDE)[1] + 12
        chat = answered(chat, first, "And what colour?")
        second = both.say(daemon, chat)
        assert counts(daemon) == (1, 1)
        wait_until_written(daemon)
        daemon.kill()
        daemon.start()
        chat = answered(chat, second, "And then?")
        third = both.say(daemon, chat)
        assert third.n_prompt - third.reuse["prefill"] >= first.n_prompt
        assert counts(daemon) == (0, 0)
        chat = answered(chat, third, "four five")
        chat[-1] = message((2, HIGH), "and", (3, SQUARE), (1, WIDE), "Which is best?")
        fourth = both.say(daemon, chat)
        assert counts(daemon) == (3, 3)
        assert daemon.stop() == 0, daemon.log
        daemon.start()
        chat = answered(chat, fourth, "Why?")
        fifth = both.say(daemon, chat)
        assert fifth.n_prompt - fifth.reuse["prefill"] >= third.n_prompt
        assert counts(daemon) == (0, 0)
        assert daemon.stop() == 0, daemon.log
    with daemon.stored():
        pass
