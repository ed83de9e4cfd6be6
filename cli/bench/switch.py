"""`towerctl bench switch`: forty chats over one base, round robin, against llama-server.

Both servers get the same model, the same context size and the same requests one after another;
everything else is their default. Time to first token is what a user waits at each switch. With
`--engine llama-server` towerd is measured in front of a llama-server of its own, with `--engine
both` both engines against one run of the rival, which takes most of the time. With `--rival
slot-proxy` the rival is a llama-server whose slots are saved and restored whole at every turn, and
the bytes that both write to disk are counted, too, including the restart and the last stop.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from towerd.cli.bench.harness.client import Ask, connect, daemon_stats, new_session
from towerd.cli.bench.harness.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, llama_server, towerd_server
from towerd.cli.lab import SLOT_RIVAL, laboratory_module
from towerd.engine.llama_server.slot_files.slotdir import SlotDir
from towerd.errors import TowerdError
from towerd.settings.config import ENGINES

BOTH = "both"
"""Every engine, or every rival; each rival runs once."""
RIVALS = ("llama-server", "slot-proxy")


@dataclass(frozen=True, slots=True)
class SwitchLoad:
    """The conversation mix."""

    chats: int = 40
    base_tokens: int = 1000
    own_tokens: int = 500
    rounds: int = 3
    user_tokens: int = 8
    reply_tokens: int = 20
    ctx_size: int = 8192
    restart_chats: int = 5


QUICK = SwitchLoad(
    chats=10, base_tokens=400, own_tokens=200, rounds=2, ctx_size=2048, restart_chats=3
)


@dataclass(slots=True)
class Outcome:
    """Times to first token, in seconds."""

    first: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    """Tokens of the prompt that were evaluated, at every switch."""
    evaluating: list[float] = field(default_factory=list)
    """The time to evaluate them as the server reports it, in seconds."""
    idle_rss_bytes: int = 0
    """Resident memory before the first request."""
    rss_bytes: int = 0
    """The same with all chats."""
    store_bytes: int = 0
    """towerd: the size of its store after the restart."""
    stats: dict[str, Any] = field(default_factory=dict)
    """towerd: its engine's counters after the last switch; the proxy: its saves and restores."""
    bytes_written: int = 0
    """towerd: to disks, from its first start to its last stop; the proxy: its slot files, at every
    save."""
    slot_file_bytes: int = 0
    """towerd: through slot files in RAM, except for what is saved at a stop."""


async def run(
    model: Path | None,
    quick: bool,
    rounds: int | None = None,
    chats: int | None = None,
    engine: str = "embedded",
    rival: str = "llama-server",
) -> Report:
    """Run the same load on towerd and its rivals. rounds, chats: override the load's."""
    path = bench_model(model, "small" if quick else "1b")
    load = QUICK if quick else SwitchLoad()
    load = replace(load, rounds=rounds or load.rounds, chats=chats or load.chats)
    engines = ENGINES if engine == BOTH else (engine,)
    return await measure(path, load, engines, RIVALS if rival == BOTH else (rival,))


async def measure(
    path: Path, load: SwitchLoad, engines: Sequence[str], rivals: Sequence[str]
) -> Report:
    """`load` on each of towerd's engines, then on each rival. Raises TowerdError."""
    if "slot-proxy" in rivals and not can_count_written():
        raise TowerdError(
            "What towerd writes to disk cannot be counted here; compare with slot-proxy on Linux, "
            "with TMPDIR naming a folder on a disk."
        )
    n_vocab, known = vocab_size(path), {name: _rival(name) for name in rivals}
    ours = {name: await drive_towerd(path, load, n_vocab, name) for name in engines}
    theirs = {name: await each.drive(path, load, n_vocab) for name, each in known.items()}
    report = Report("switch", path.name)
    for name, outcome in ours.items():
        prefix = "proxied_" if len(ours) > 1 and name == "llama-server" else ""
        figures = _figures(load, outcome)
        for rival, other in theirs.items():
            figures |= known[rival].compare(load, outcome, other)
        if name == "llama-server":
            figures |= _restores(load, outcome)
        report.figures |= {prefix + key: value for key, value in figures.items()}
        if "llama-server" in theirs:
            report.target(f"{prefix}ratio", least=20 if name == "embedded" else 10)
        if "slot-proxy" in theirs:
            report.target(f"{prefix}ttft_vs_slot_proxy", least=2)
            report.target(f"{prefix}bytes_vs_slot_proxy", least=10)
    return report


async def drive_towerd(path: Path, load: SwitchLoad, n_vocab: int, engine: str) -> Outcome:
    """Run the load on a daemon of its own, with an empty store."""
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        store = Path(folder) / "store"
        flags = ("-c", str(load.ctx_size), "--engine", engine)
        before = written_bytes() if can_count_written() else 0
        outcome = await drive(lambda: towerd_server(path, store, *flags), connect, load, n_vocab)
        outcome.bytes_written = written_bytes() - before if can_count_written() else 0
        outcome.store_bytes = sum(f.stat().st_size for f in store.rglob("*") if f.is_file())
    return outcome


async def drive_llama_server(path: Path, load: SwitchLoad, n_vocab: int) -> Outcome:
    """Run the load on llama-server with its defaults."""
    ctx = str(load.ctx_size)
    return await drive(lambda: llama_server(path, "-c", ctx), connect, load, n_vocab)


def _restores(load: SwitchLoad, ours: Outcome) -> dict[str, Any]:
    """The figures of restores through slot files."""
    stats = ours.stats
    return {
        "restores": stats["restores"],
        "restores_missed": stats["restores_missed"],
        "restore_gbps": stats["restore_bytes"] / 1e6 / max(stats["restore_ms"], 1e-3),
        "bytes_restored_per_turn": stats["restore_bytes"] / len(ours.switches),
        "bytes_stored_per_chat": ours.store_bytes / load.chats,
    }


def _figures(load: SwitchLoad, ours: Outcome) -> dict[str, Any]:
    """The figures of towerd alone."""
    return {
        "chats": load.chats,
        "switches": len(ours.switches),
        "towerd_ttft_p50_s": statistics.median(ours.switches),
        "towerd_ttft_max_s": max(ours.switches),
        "towerd_after_restart_s": statistics.median(ours.restarted),
        "towerd_first_s": statistics.median(ours.first),
        "towerd_prompt_tokens_p50": statistics.median(ours.evaluated),
        "towerd_evaluating_p50_s": statistics.median(ours.evaluating),
        "store_bytes": ours.store_bytes,
        "towerd_rss_bytes": ours.rss_bytes,
    }


def _beside_llama_server(_: SwitchLoad, ours: Outcome, theirs: Outcome) -> dict[str, Any]:
    median = statistics.median
    return {
        "llama_server_ttft_p50_s": median(theirs.switches),
        "ratio": median(theirs.switches) / median(ours.switches),
        "llama_server_after_restart_s": median(theirs.restarted),
        "after_restart_ratio": median(theirs.restarted) / median(ours.restarted),
        "llama_server_first_s": median(theirs.first),
        "llama_server_prompt_tokens_p50": median(theirs.evaluated),
        "llama_server_rss_bytes": theirs.rss_bytes,
    }


@dataclass(frozen=True, slots=True)
class SwitchRival:
    """Whom towerd is compared with."""

    drive: Callable[[Path, SwitchLoad, int], Awaitable[Outcome]]
    compare: Callable[[SwitchLoad, Outcome, Outcome], dict[str, Any]]
    """The figures of the comparison; towerd's outcome is the first argument."""


def _rival(name: str) -> SwitchRival:
    """Raises ClickException for one that only the laboratory has."""
    if name == "llama-server":
        return SwitchRival(drive_llama_server, _beside_llama_server)
    found: SwitchRival = laboratory_module(
        SLOT_RIVAL, f"towerctl bench switch --rival {name}"
    ).RIVAL
    return found


async def drive(
    make: Callable[[], ServerProcess],
    connect_to: Callable[[str], AbstractAsyncContextManager[Ask]],
    load: SwitchLoad,
    n_vocab: int,
) -> Outcome:
    """Run the load on one server. make: a new server; connect_to: how its chats are asked."""
    rng = np.random.default_rng(7)
    base = random_prompt(rng, load.base_tokens, n_vocab).tolist()
    chats = [
        base + random_prompt(rng, load.own_tokens, n_vocab).tolist() for _ in range(load.chats)
    ]
    outcome = Outcome()
    with make() as server:
        outcome.idle_rss_bytes = server.rss_bytes()
        async with connect_to(server.url) as ask:
            for turn in range(load.rounds + 1):
                click.echo(f"{server.url}: round {turn} of {load.rounds}", err=True)
                for i, history in enumerate(chats):
                    said = random_prompt(rng, load.user_tokens, n_vocab).tolist() if turn else []
                    done = await ask(history + said, load.reply_tokens)
                    (outcome.switches if turn else outcome.first).append(done.ttft_s)
                    if turn:
                        outcome.evaluated.append(int(done.timings["prompt_n"]))
                        outcome.evaluating.append(done.timings["prompt_ms"] / 1e3)
                    chats[i] = history + said + done.tokens
        outcome.stats = await _engine_stats(server.url)
        outcome.slot_file_bytes = _slot_file_bytes(outcome.stats)
        outcome.rss_bytes = server.rss_bytes()
        server.stop()
        server.start()
        async with connect_to(server.url) as ask:
            for history in chats[: load.restart_chats]:
                said = random_prompt(rng, load.user_tokens, n_vocab).tolist()
                done = await ask(history + said, load.reply_tokens)
                outcome.restarted.append(done.ttft_s)
        outcome.slot_file_bytes += _slot_file_bytes(await _engine_stats(server.url))
    return outcome


async def _engine_stats(url: str) -> dict[str, Any]:
    """The counters of towerd's engine since its start; empty for llama-server."""
    async with new_session() as session:
        return dict((await daemon_stats(session, url)).get("engine", {}))


def _slot_file_bytes(stats: dict[str, Any]) -> int:
    """Bytes that went through slot files; 0 for the embedded engine."""
    return int(stats.get("restore_bytes", 0) + stats.get("save_bytes", 0))


def can_count_written() -> bool:
    """Whether this system counts the bytes that processes write, and temporary files are on a disk:
    writes into RAM are not counted."""
    return (
        hasattr(psutil.Process, "io_counters") and not SlotDir(Path(tempfile.gettempdir())).in_ram
    )


def written_bytes() -> int:
    """The bytes that this process has written to disks, including those of ended children and their
    descendants. Pages in the page cache count as written."""
    return int(psutil.Process().io_counters().write_bytes)
