"""`towerctl bench switch`: forty chats over one base, round robin, against llama-server.

Both servers get the same model, the same context size and the same requests one after another;
everything else is their default. Time to first token is what a person waits at each switch.
With `--engine llama-server` towerd is measured in front of a llama-server of its own, with
`--engine both` each way against one run of its rival, which takes most of the time.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from towerd.cli.bench.client import complete, new_session
from towerd.cli.bench.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.report import Report
from towerd.cli.bench.servers import ServerProcess, llama_server, towerd_server
from towerd.config import ENGINES

BOTH = "both"
"""Every engine, against one run of the rival."""


@dataclass(frozen=True, slots=True)
class Load:
    """The conversation mix."""

    chats: int = 40
    base_tokens: int = 1000
    own_tokens: int = 500
    rounds: int = 3
    user_tokens: int = 8
    reply_tokens: int = 20
    ctx_size: int = 8192
    restart_chats: int = 5


QUICK = Load(chats=10, base_tokens=400, own_tokens=200, rounds=2, ctx_size=2048, restart_chats=3)


@dataclass(slots=True)
class Outcome:
    """Times to first token, in seconds."""

    first: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    rss_bytes: int = 0
    store_bytes: int = 0
    """Of towerd: its store after the restart."""
    stats: dict[str, Any] = field(default_factory=dict)
    """Of towerd: its engine's counters after the last switch."""


async def run(
    model: Path | None,
    quick: bool,
    rounds: int | None = None,
    chats: int | None = None,
    engine: str = "embedded",
) -> Report:
    """Run the same load on towerd and on llama-server. `rounds`, `chats`: other than usual."""
    path = bench_model(model, "small" if quick else "1b")
    load = QUICK if quick else Load()
    load = replace(load, rounds=rounds or load.rounds, chats=chats or load.chats)
    n_vocab = vocab_size(path)
    engines = ENGINES if engine == BOTH else (engine,)
    ours = {name: await _drive_towerd(path, load, n_vocab, name) for name in engines}
    ctx = str(load.ctx_size)
    theirs = await _drive(lambda: llama_server(path, "-c", ctx), load, n_vocab)
    report = Report("switch", path.name)
    for name, outcome in ours.items():
        prefix = "proxied_" if engine == BOTH and name == "llama-server" else ""
        figures = _figures(load, outcome, theirs)
        if name == "llama-server":
            figures |= _restores(load, outcome)
        report.figures |= {prefix + key: value for key, value in figures.items()}
        report.target(f"{prefix}ratio", least=20 if name == "embedded" else 10)
    return report


async def _drive_towerd(path: Path, load: Load, n_vocab: int, engine: str) -> Outcome:
    """The load on a daemon of its own, with an empty store."""
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        store = Path(folder) / "store"
        flags = ("-c", str(load.ctx_size), "--engine", engine)
        outcome = await _drive(lambda: towerd_server(path, store, *flags), load, n_vocab)
        outcome.store_bytes = sum(f.stat().st_size for f in store.rglob("*") if f.is_file())
    return outcome


def _restores(load: Load, ours: Outcome) -> dict[str, Any]:
    """What went through slot files."""
    stats = ours.stats
    return {
        "restores": stats["restores"],
        "restores_missed": stats["restores_missed"],
        "restore_gbps": stats["restore_bytes"] / 1e6 / max(stats["restore_ms"], 1e-3),
        "bytes_restored_per_turn": stats["restore_bytes"] / len(ours.switches),
        "bytes_stored_per_chat": ours.store_bytes / load.chats,
    }


def _figures(load: Load, ours: Outcome, theirs: Outcome) -> dict[str, Any]:
    median = statistics.median
    return {
        "chats": load.chats,
        "switches": len(ours.switches),
        "towerd_ttft_p50_s": median(ours.switches),
        "towerd_ttft_max_s": max(ours.switches),
        "llama_server_ttft_p50_s": median(theirs.switches),
        "ratio": median(theirs.switches) / median(ours.switches),
        "towerd_after_restart_s": median(ours.restarted),
        "llama_server_after_restart_s": median(theirs.restarted),
        "after_restart_ratio": median(theirs.restarted) / median(ours.restarted),
        "towerd_first_s": median(ours.first),
        "llama_server_first_s": median(theirs.first),
        "towerd_prompt_tokens_p50": median(ours.evaluated),
        "llama_server_prompt_tokens_p50": median(theirs.evaluated),
        "store_bytes": ours.store_bytes,
        "towerd_rss_bytes": ours.rss_bytes,
        "llama_server_rss_bytes": theirs.rss_bytes,
    }


async def _drive(make: Callable[[], ServerProcess], load: Load, n_vocab: int) -> Outcome:
    rng = np.random.default_rng(7)
    base = random_prompt(rng, load.base_tokens, n_vocab).tolist()
    chats = [
        base + random_prompt(rng, load.own_tokens, n_vocab).tolist() for _ in range(load.chats)
    ]
    outcome = Outcome()
    with make() as server:
        async with new_session() as session:
            for turn in range(load.rounds + 1):
                click.echo(f"{server.url}: round {turn} of {load.rounds}", err=True)
                for i, history in enumerate(chats):
                    said = random_prompt(rng, load.user_tokens, n_vocab).tolist() if turn else []
                    done = await complete(session, server.url, history + said, load.reply_tokens)
                    (outcome.switches if turn else outcome.first).append(done.ttft_s)
                    if turn:
                        outcome.evaluated.append(int(done.timings["prompt_n"]))
                    chats[i] = history + said + done.tokens
            async with session.get(f"{server.url}/towerd/v1/stats") as reply:
                if reply.status == 200:  # llama-server has none
                    outcome.stats = (await reply.json())["engine"]
        outcome.rss_bytes = server.rss_bytes()
        server.stop()
        server.start()
        async with new_session() as session:
            for history in chats[: load.restart_chats]:
                said = random_prompt(rng, load.user_tokens, n_vocab).tolist()
                done = await complete(session, server.url, history + said, load.reply_tokens)
                outcome.restarted.append(done.ttft_s)
    return outcome
