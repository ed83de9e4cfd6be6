"""`towerctl bench proxy`: the latency that towerd adds in front of a llama-server.

Both run at once with the same flags and take turns, request by request, in alternating order, so
that other load on the machine affects both; a pause before each request lets the other server come
to rest. Every request is a cached turn: the next one of a conversation that is in its slot, with a
few new tokens. The added latency is the median difference between two such requests, as both vary
more from turn to turn than towerd adds.
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

from lab.bench.processes import cpu_s
from towerd.cli.bench.harness.client import Completion, chat, complete, new_session
from towerd.cli.bench.harness.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, llama_server, towerd_server

SAID_TOKENS = 4
REPLY_TOKENS = 16
PAUSE_S = 0.05
"""After a reply, llama-server's threads spin for a while, and towerd finishes background work."""


@dataclass(frozen=True, slots=True)
class ProxyLoad:
    """The conversations of `streams` concurrent clients."""

    streams: int
    prompt_tokens: int
    turns: int
    """Turns of one conversation; then the next one begins."""
    conversations: int
    """Conversations of every stream, one after the other."""

    @property
    def cells(self) -> int:
        """Tokens of context that all its conversations take, so that none is evicted."""
        turn_tokens = SAID_TOKENS + REPLY_TOKENS
        n = self.prompt_tokens + (self.turns + 1) * turn_tokens + 64
        return self.streams * self.conversations * n


N_SLOTS = 32
FULL = (ProxyLoad(1, 512, 16, 9), ProxyLoad(32, 64, 8, 1))
QUICK = (ProxyLoad(1, 256, 8, 8), ProxyLoad(32, 64, 4, 1))
"""32 streams share one context, and each step attends to all of it, so they are short."""
CHATS_FULL = (2, 16)
CHATS_QUICK = (5, 14)
"""The number of chats, one after the other, and the turns of each."""
CHAT_CELLS = 4096
"""More than a chat ever takes."""
SYSTEM_WORDS = 60
SAID_WORDS = 3
WORDS = (
    "river",
    "stone",
    "lamp",
    "winter",
    "paper",
    "garden",
    "seven",
    "cloud",
    "because",
    "often",
)


@dataclass(slots=True)
class Times:
    """The measurements of one server's clients, in milliseconds, and the server's CPU time."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    """From the last token to the end of the reply."""
    cpu_ms: float = 0.0

    def add(self, done: Completion) -> None:
        self.first.append(done.ttft_s * 1e3)
        n_later = len(done.tokens) - 1
        self.per_token.append((done.last_token_s - done.ttft_s) * 1e3 / max(n_later, 1))
        self.end.append((done.total_s - done.last_token_s) * 1e3)


async def run(model: Path | None, quick: bool) -> Report:
    """Both servers, taking turns."""
    path = bench_model(model, "tiny" if quick else "small")
    loads, n_vocab = QUICK if quick else FULL, vocab_size(path)
    report = Report("proxy", path.name)
    n_chats, n_turns = CHATS_QUICK if quick else CHATS_FULL
    for load in loads:
        cells = load.cells + (n_chats * CHAT_CELLS if load.streams == 1 else 0)
        flags = ("-c", str(cells), "-np", str(N_SLOTS))
        with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
            store = Path(folder) / "store"
            sidecar = towerd_server(path, store, "--engine", "llama-server", *flags)
            direct = llama_server(path, *flags, "-kvu", "--cache-ram", "0", "--no-cache-idle-slots")
            with sidecar, direct:
                _enter(report, load, *await _measure((direct, sidecar), load, n_vocab))
                if load.streams == 1:
                    await _enter_chats(report, (direct, sidecar), n_chats, n_turns)
    report.target("added_ttft_p50_ms", most=5)
    report.target("added_per_token_p50_ms", most=0.5)
    return report


async def _measure(servers: Sequence[ServerProcess], load: ProxyLoad, n_vocab: int) -> list[Times]:
    """The times of each server under the load."""
    rng = np.random.default_rng(load.streams)

    def random_prompts(n_tokens: int) -> list[list[int]]:
        return [random_prompt(rng, n_tokens, n_vocab).tolist() for _ in range(load.streams)]

    times = [Times() for _ in servers]
    async with new_session() as session:
        for _ in range(load.conversations):
            first = random_prompts(load.prompt_tokens)
            chats = [list(first) for _ in servers]
            for server, prompts in zip(servers, chats, strict=True):
                await _turn(session, server, prompts)
            for turn in range(load.turns):
                said = random_prompts(SAID_TOKENS)
                for i in turn_order(turn):
                    server, prompts, found = servers[i], chats[i], times[i]
                    await asyncio.sleep(PAUSE_S)
                    prompts[:] = [p + new for p, new in zip(prompts, said, strict=True)]
                    before = cpu_s(server)
                    for done in await _turn(session, server, prompts):
                        found.add(done)
                    found.cpu_ms += (cpu_s(server) - before) * 1e3
    return times


def turn_order(turn: int) -> tuple[int, int]:
    """The order in which the servers are asked, which alternates."""
    return (0, 1) if turn % 2 == 0 else (1, 0)


async def _turn(
    session: aiohttp.ClientSession, server: ServerProcess, prompts: list[list[int]]
) -> list[Completion]:
    """A turn of every conversation, concurrently; the replies are appended to `prompts`."""
    done = await asyncio.gather(
        *(complete(session, server.url, prompt, REPLY_TOKENS) for prompt in prompts)
    )
    for prompt, reply in zip(prompts, done, strict=True):
        prompt += reply.tokens
    return done


async def _enter_chats(
    report: Report, servers: Sequence[ServerProcess], n_chats: int, n_turns: int
) -> None:
    """Add the figures of chats that continue in their slots, from the third turn on."""
    rng = np.random.default_rng(7)

    def said(role: str, n_words: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choice(WORDS, n_words))}

    first: list[list[float]] = [[] for _ in servers]
    async with new_session() as session:
        for _ in range(n_chats):
            begun = [said("system", SYSTEM_WORDS)]
            chats = [list(begun) for _ in servers]
            for turn in range(n_turns + 2):
                asked = said("user", SAID_WORDS)
                for i in turn_order(turn):
                    server, messages, found = servers[i], chats[i], first[i]
                    await asyncio.sleep(PAUSE_S)
                    messages.append(asked)
                    done = await chat(session, server.url, messages, REPLY_TOKENS)
                    messages.append({"role": "assistant", "content": done.text})
                    if turn >= 2:  # until then a continued chat is not recognised
                        found.append(done.ttft_s * 1e3)
    direct, sidecar = first
    report.figures |= {
        "llama_server_chat_ttft_p50_ms": statistics.median(direct),
        "added_chat_ttft_p50_ms": added_ms(direct, sidecar),
        "added_chat_ttft_p50_error_ms": added_error_ms(direct, sidecar),
    }


def _enter(report: Report, load: ProxyLoad, direct: Times, sidecar: Times) -> None:
    """Add the figures under one load; those of one stream have names without a suffix."""
    tail = "" if load.streams == 1 else f"_{load.streams}"
    p50, p99 = statistics.median, _p99
    report.figures |= {
        f"llama_server_ttft_p50_ms{tail}": p50(direct.first),
        f"added_ttft_p50_ms{tail}": added_ms(direct.first, sidecar.first),
        f"added_ttft_p50_error_ms{tail}": added_error_ms(direct.first, sidecar.first),
        f"added_ttft_p99_ms{tail}": p99(sidecar.first) - p99(direct.first),
        f"llama_server_per_token_p50_ms{tail}": p50(direct.per_token),
        f"added_per_token_p50_ms{tail}": added_ms(direct.per_token, sidecar.per_token),
        f"added_per_token_p50_error_ms{tail}": added_error_ms(direct.per_token, sidecar.per_token),
        f"added_end_p50_ms{tail}": added_ms(direct.end, sidecar.end),
        f"towerd_cpu_per_turn_ms{tail}": sidecar.cpu_ms / len(sidecar.first),
    }


def added_ms(direct: Sequence[float], sidecar: Sequence[float]) -> float:
    """The median of the differences between towerd's and llama-server's time for each request."""
    return statistics.median(ours - its for its, ours in zip(direct, sidecar, strict=True))


def added_error_ms(direct: Sequence[float], sidecar: Sequence[float]) -> float:
    """Half the width of that median's confidence interval, at about 95 % (McGill, Tukey and Larsen
    1978, notches of box plots)."""
    low, high = np.percentile(np.subtract(sidecar, direct), (25, 75))
    return float(1.57 * (high - low) / len(direct) ** 0.5)


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
