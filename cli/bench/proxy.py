"""`towerctl bench proxy`: what towerd adds to llama-server's own times when it stands before it.

Both run at once with the same flags and take turns, request by request, so that whatever else the
machine does falls on both. Every request is a cached turn: the next one of a conversation that is
in its slot, with a few new tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from towerd.cli.bench.client import Completion, complete, new_session
from towerd.cli.bench.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.report import Report
from towerd.cli.bench.servers import ServerProcess, llama_server, towerd_server

STREAMS = (1, 32)


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked."""

    prompt_tokens: int = 512
    said_tokens: int = 4
    reply_tokens: int = 16
    turns: int = 16
    """Of one conversation; then the next one begins."""
    conversations: tuple[int, ...] = (12, 1)
    """Of every stream, by number of streams as in `STREAMS`."""


QUICK = Load(prompt_tokens=256, turns=8, conversations=(8, 1))


@dataclass(slots=True)
class Times:
    """What one server's clients measured, in milliseconds."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)

    def add(self, done: Completion) -> None:
        self.first.append(done.ttft_s * 1e3)
        n_later = len(done.tokens) - 1
        self.per_token.append((done.total_s - done.ttft_s) * 1e3 / max(n_later, 1))


async def run(model: Path | None, quick: bool) -> Report:
    """Both servers, taking turns."""
    path = bench_model(model, "tiny" if quick else "small")
    load, n_vocab = QUICK if quick else Load(), vocab_size(path)
    turn_tokens = load.said_tokens + load.reply_tokens
    n_cells = max(STREAMS) * (load.prompt_tokens + (load.turns + 1) * turn_tokens + 64)
    flags = ("-c", str(n_cells), "-np", str(max(STREAMS)))
    report = Report("proxy", path.name)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        store = Path(folder) / "store"
        sidecar = towerd_server(path, store, "--engine", "llama-server", *flags)
        direct = llama_server(path, *flags, "-kvu", "--cache-ram", "0", "--no-cache-idle-slots")
        with sidecar, direct:
            for n, conversations in zip(STREAMS, load.conversations, strict=True):
                times = await _measure((direct, sidecar), load, n, conversations, n_vocab)
                _enter(report, n, *times)
    report.target("added_ttft_p50_ms", most=2)
    report.target("added_per_token_p50_ms", most=0.2)
    return report


async def _measure(
    servers: Sequence[ServerProcess], load: Load, n: int, conversations: int, n_vocab: int
) -> list[Times]:
    """The times of each server with `n` streams at once."""
    rng = np.random.default_rng(n)
    times = [Times() for _ in servers]
    async with new_session() as session:
        for _ in range(conversations):
            first = [random_prompt(rng, load.prompt_tokens, n_vocab).tolist() for _ in range(n)]
            chats = [list(first) for _ in servers]
            for server, prompts in zip(servers, chats, strict=True):
                await _turn(session, server, prompts, load)
            for _ in range(load.turns):
                said = [random_prompt(rng, load.said_tokens, n_vocab).tolist() for _ in range(n)]
                for server, prompts, found in zip(servers, chats, times, strict=True):
                    prompts[:] = [p + new for p, new in zip(prompts, said, strict=True)]
                    for done in await _turn(session, server, prompts, load):
                        found.add(done)
    return times


async def _turn(
    session: aiohttp.ClientSession,
    server: ServerProcess,
    prompts: list[list[int]],
    load: Load,
) -> list[Completion]:
    """A turn of every conversation, all at the same time; the replies are added to them."""
    done = await asyncio.gather(
        *(complete(session, server.url, prompt, load.reply_tokens) for prompt in prompts)
    )
    for prompt, reply in zip(prompts, done, strict=True):
        prompt += reply.tokens
    return done


def _enter(report: Report, n: int, direct: Times, sidecar: Times) -> None:
    """The figures for `n` streams: those of one stream have the plain names."""
    tail = "" if n == 1 else f"_{n}"
    p50, p99 = statistics.median, _p99
    report.figures |= {
        f"llama_server_ttft_p50_ms{tail}": p50(direct.first),
        f"added_ttft_p50_ms{tail}": p50(sidecar.first) - p50(direct.first),
        f"added_ttft_p99_ms{tail}": p99(sidecar.first) - p99(direct.first),
        f"llama_server_per_token_p50_ms{tail}": p50(direct.per_token),
        f"added_per_token_p50_ms{tail}": p50(sidecar.per_token) - p50(direct.per_token),
    }


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
