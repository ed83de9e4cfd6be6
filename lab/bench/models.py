"""`towerctl bench models`: two models in turn with room for one, against llama-server's router.

Each model has a chat. At every switch the other model is unloaded, this one is loaded, and its chat
continues with a few tokens: three times that a user waits for, measured one by one on both servers, so
that what loading the weights takes can be left out. What it takes to evaluate the whole chat is
measured by towerd when the chat begins.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import click
import numpy as np

from lab.bench.processes import llama_router, towerd_router
from lab.models.kept import random_model
from lab.models.random_gguf import PRESETS
from towerd.cli.bench.harness.client import complete, new_session
from towerd.cli.bench.harness.models import random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess
from towerd.errors import TowerdError

NAMES = ("one", "two")
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class SwitchedModels:
    """The shape of both models, and the chat that each has."""

    preset: str
    prompt_tokens: int
    switches: int
    user_tokens: int = 8
    reply_tokens: int = 8

    @property
    def ctx_size(self) -> int:
        """Room for a chat at its end."""
        turns = (2 * self.switches + 1) * (self.user_tokens + self.reply_tokens)
        return -(-(self.prompt_tokens + turns) // 256) * 256


FULL = SwitchedModels("1b", 2048, 8)
QUICK = SwitchedModels("small", 512, 4)


@dataclass(slots=True)
class SwitchTimes:
    """What a user waits for, in seconds."""

    first: list[float] = field(default_factory=list)
    """To the first token of a chat that is evaluated whole; its model is loaded."""
    unload: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    """To the first token of a chat that continues, from when its model is loaded."""
    live: list[float] = field(default_factory=list)
    """To that of the turn after it: nothing is restored, so that no server is faster."""
    evaluated: list[int] = field(default_factory=list)
    """Tokens of its prompt that were evaluated."""

    def total_s(self) -> float:
        """Median of a whole switch."""
        parts = zip(self.unload, self.load, self.ttft, strict=True)
        return statistics.median(sum(each) for each in parts)


async def run(model: Path | None, quick: bool) -> Report:
    """The same switches on towerd and on llama-server. model: not used; there must be two."""
    load = QUICK if quick else FULL
    shape = PRESETS[load.preset]
    files = [
        random_model(load.preset, shape, announce=True),
        random_model(f"{load.preset}-2", shape, seed=1, announce=True),
    ]
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as name:
        folder = Path(name)
        (folder / "models").mkdir()
        for link, file in zip(NAMES, files, strict=True):
            (folder / "models" / f"{link}.gguf").symlink_to(file.resolve())
        flags = ("--models-max", "1", "-c", str(load.ctx_size))
        n_vocab = vocab_size(files[0])
        ours = await drive(towerd_router(folder, *flags), load, n_vocab)
        theirs = await drive(llama_router(folder, *flags), load, n_vocab)
    report = Report("models", files[0].name, _figures(load, ours, theirs))
    if not quick:
        report.target("ratio", least=100)
    return report


def _figures(load: SwitchedModels, ours: SwitchTimes, theirs: SwitchTimes) -> dict[str, float]:
    median = statistics.median
    return {
        "prompt_tokens": load.prompt_tokens,
        "switches": len(ours.ttft),
        "prefill_s": median(ours.first),
        "ttft_p50_s": median(ours.ttft),
        "ratio": median(ours.first) / median(ours.ttft),
        "live_ttft_p50_s": median(ours.live),
        "ratio_limit": median(ours.first) / median(ours.live),
        "prompt_tokens_evaluated_p50": median(ours.evaluated),
        "unload_p50_s": median(ours.unload),
        "load_p50_s": median(ours.load),
        "switch_p50_s": ours.total_s(),
        "llama_server_ttft_p50_s": median(theirs.ttft),
        "llama_server_unload_p50_s": median(theirs.unload),
        "llama_server_load_p50_s": median(theirs.load),
        "llama_server_switch_p50_s": theirs.total_s(),
        "vs_router": theirs.total_s() / ours.total_s(),
        "vs_router_ttft": median(theirs.ttft) / median(ours.ttft),
    }


async def drive(made: ServerProcess, load: SwitchedModels, n_vocab: int) -> SwitchTimes:
    """Begin a chat in each model of a router, then switch between them."""
    rng = np.random.default_rng(11)
    chats = {name: random_prompt(rng, load.prompt_tokens, n_vocab).tolist() for name in NAMES}
    times = SwitchTimes()
    with made as server:
        async with new_session() as session:
            for turn in range(load.switches + len(NAMES)):
                name, other = NAMES[turn % 2], NAMES[(turn + 1) % 2]
                click.echo(f"{server.url}: {name}, turn {turn}", err=True)
                unload_s = await _change(session, server.url, "unload", other) if turn else 0.0
                load_s = await _change(session, server.url, "load", name)
                is_first = turn < len(NAMES)
                for ttft_s in (times.first,) if is_first else (times.ttft, times.live):
                    n_said = 0 if is_first else load.user_tokens
                    chat = chats[name] + random_prompt(rng, n_said, n_vocab).tolist()
                    done = await complete(session, server.url, chat, load.reply_tokens, model=name)
                    chats[name] = chat + done.tokens
                    ttft_s.append(done.ttft_s)
                    if ttft_s is times.ttft:
                        times.evaluated.append(int(done.timings["prompt_n"]))
                if not is_first:
                    times.unload.append(unload_s)
                    times.load.append(load_s)
    return times


async def _change(session: aiohttp.ClientSession, url: str, action: str, name: str) -> float:
    """Load or unload a model; the seconds that takes. Raises TowerdError."""
    wanted = action + "ed"
    began = time.perf_counter()
    async with session.post(f"{url}/models/{action}", json={"model": name}) as reply:
        if reply.status != 200:
            raise TowerdError(f"{url} does not {action} {name}: {(await reply.text())[:300]}")
    while True:
        async with session.get(f"{url}/models") as reply:
            listed = {each["id"]: each["status"] for each in (await reply.json())["data"]}
        if listed[name]["value"] == wanted:
            return time.perf_counter() - began
        if listed[name].get("failed"):
            raise TowerdError(f"{url} failed to {action} {name}.")
        await asyncio.sleep(POLL_S)
