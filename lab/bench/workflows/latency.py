"""`towerctl bench workflows`: agents that work together, in a cache with room for a part of what they use.

Workflows of several apps run side by side, each a dynamic walk over its app's call graph, every step a
chat request (see `load`). Tools take a while between steps, scaled to the speed of the model, measured
first, so that the server is busy about half of the time. The first workflows fill the tiers and train
what learns; the others are measured. The same workflows run under each policy, on a daemon of their own.

RAM and disk each hold a share of all distinct tokens, the live context two prompts. With hints the client
names session, workflow and agent and tells the end; without, the daemon recognises what it can.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
from gguf import GGUFReader

from lab.bench.workflows import server as own_server
from lab.bench.workflows.cells import (
    CONCURRENCIES,
    CONCURRENCIES_QUICK,
    SHARES,
    Compared,
    WorkflowCell,
    chosen,
)
from lab.bench.workflows.client import ServedModel, WorkflowClient, probe
from lab.bench.workflows.load import (
    WorkflowLoad,
    distinct_tokens,
    least_evaluated,
    prompt_tokens,
    walks,
)
from lab.bench.workflows.report import CellOutcome, costs, figures, ratio, table
from lab.models.kept import random_model
from lab.models.shape import Shape
from towerd.cli.bench.harness.client import daemon_stats, new_session
from towerd.cli.bench.harness.models import bench_model
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, towerd_process, towerd_server
from towerd.cli.output import show_table

LOAD = WorkflowLoad(app_words=20, base_words=70, task_words=10, result_words=6)
"""Short, because the 1B shape evaluates 60 tokens in a second on two cores."""
QUICK = WorkflowLoad(requests=130, warm_requests=45, task_words=100, result_words=150)
"""So that evaluation is most of the time of a request, and all bases fit into the memory that is compared."""
QUICK_SHAPE = Shape(2, 256, 4, 2, 768, 8192, n_ctx_train=32768)
_QUICK_THREADS = 1
"""Two threads wait for each other on a machine with two cores that the client uses, too."""
SEEDS, SEEDS_QUICK = 5, 2
BUSY = 0.5
"""Share of the time in which LRU's server should be busy."""
_FOUND = 0.5
"""Share of a prompt that it finds, about."""
_CTX = 4096
_PREFETCH_BYTES = 64 << 20
_LIVE_CHATS = 2
"""One that runs, and one that may be prefetched."""


async def run(
    model: Path | None,
    quick: bool,
    *,
    policies: Sequence[str] = (),
    shares: Sequence[float] = (),
    concurrencies: Sequence[int] = (),
    seeds: int | None = None,
    threads: int | None = None,
) -> Report:
    """Run every cell with the workflows of every seed. Empty: the defaults of `quick`, or of the whole
    benchmark. threads: of the daemons; None: their default."""
    load = QUICK if quick else LOAD
    shares = shares or (SHARES[:1] if quick else SHARES)
    concurrencies = concurrencies or (CONCURRENCIES_QUICK if quick else CONCURRENCIES)
    if model is None and quick:
        path = random_model("workflows-small", QUICK_SHAPE, announce=True)
    else:
        path = bench_model(model, "1b")
    threads = threads or (_QUICK_THREADS if quick else None)
    flags = () if threads is None else ("-t", str(threads))
    compared, cells = chosen(policies, shares, concurrencies, quick)
    n_seeds = seeds or (SEEDS_QUICK if quick else SEEDS)
    served = await _probed(path, load, flags)
    found: dict[WorkflowCell, list[CellOutcome]] = {cell: [] for cell in cells}
    for seed in range(n_seeds):
        for n, cell in enumerate(cells):
            click.echo(
                f"seed {seed + 1} of {n_seeds}, {n + 1} of {len(cells)}: {cell.name}", err=True
            )
            found[cell].append(await _drive(served, load, cell, seed, flags))
    return _report(path, served, load, compared, found)


def _report(
    path: Path,
    served: ServedModel,
    load: WorkflowLoad,
    compared: Compared,
    found: dict[WorkflowCell, list[CellOutcome]],
) -> Report:
    rows = {cell.name: figures(outcomes) for cell, outcomes in found.items()}
    show_table(*table(rows))
    report = Report("workflows", path.name)
    hinted = rows[compared.hinted.name]
    report.figures |= {
        "policy": compared.policy,
        "seeds": len(found[compared.lru]),
        "share": compared.share,
        "concurrency": compared.concurrency,
        "requests": sum(len(w.steps) for each in found[compared.lru] for w in each.measured),
        "tokens_per_s": served.tokens_per_s,
        "evaluated_lru": rows[compared.lru.name]["evaluated_mean"],
        "evaluated": hinted["evaluated_mean"],
        "evaluated_least": _least_evaluated(served, load, len(found[compared.lru])),
        "lru_ttft_p50_s": rows[compared.lru.name]["ttft_p50_s"],
        "policy_ttft_p50_s": hinted["ttft_p50_s"],
        "base_miss": hinted["base_miss"],
        "base_miss_lru": rows[compared.lru.name]["base_miss"],
        **_ratios(compared, found),
        **costs(found[compared.hinted]),
    }
    report.details["cells"] = rows
    report.target("ttft_ratio_hints_low", least=1.5)
    report.target("ttft_ratio_low", least=1.2)
    report.target("base_miss", most=0.02)
    report.target("prefetch_ratio", least=1.1)
    report.target("lies_ratio", most=1.05)
    return report


def _ratios(compared: Compared, found: dict[WorkflowCell, list[CellOutcome]]) -> dict[str, float]:
    """The figures with targets, each with the ends of its interval."""
    lru, hinted = found[compared.lru], found[compared.hinted]
    three = {
        "ttft_ratio_hints": ratio(lru, hinted, median),
        "ttft_ratio_hints_mean": ratio(lru, hinted, mean),
        "ttft_ratio": ratio(lru, found[compared.unhinted], median),
        "ttft_ratio_mean": ratio(lru, found[compared.unhinted], mean),
        "prefetch_ratio": ratio(hinted, found[compared.prefetched], median),
        "lies_ratio": ratio(found[compared.lied], lru, mean),
    }
    out: dict[str, float] = {}
    for name, (value, low, high) in three.items():
        out |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return out


def _least_evaluated(served: ServedModel, load: WorkflowLoad, seeds: int) -> float:
    """Mean tokens that a request evaluates if nothing is ever evicted."""
    each = [walks(load, served.words, seed) for seed in range(seeds)]
    return mean(
        n
        for all_walks in each
        for walk in all_walks
        if walk.is_measured
        for n in least_evaluated(load, walk, served.overhead)
    )


def vocabulary_words(path: Path) -> tuple[str, ...]:
    """The words of a GGUF's vocabulary that are one token each behind a space."""
    field = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    assert field is not None
    pieces: list[str] = field.contents()
    bare = [piece[1:] for piece in pieces if piece[:1] in ("\u2581", "\u0120")]
    return tuple(word for word in bare if word.isascii() and word.isalpha() and len(word) > 2)


async def _probed(path: Path, load: WorkflowLoad, flags: tuple[str, ...]) -> ServedModel:
    words = vocabulary_words(path)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "probe", "-c", str(_CTX), *flags) as server:
            async with new_session() as session:
                return await probe(session, server.url, path, words, load)


async def _drive(
    model: ServedModel, load: WorkflowLoad, cell: WorkflowCell, seed: int, flags: tuple[str, ...]
) -> CellOutcome:
    """Run one cell with the workflows of a seed."""
    all_walks = walks(load, model.words, seed)
    room = cell.share * distinct_tokens(load, all_walks, model.overhead) * model.token_bytes
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        options, spent = Path(folder) / "options.json", Path(folder) / "costs.json"
        told = {"walks": {w.name: w.agents for w in all_walks}, "costs": str(spent)}
        options.write_text(json.dumps(told))
        with _server(model.path, Path(folder), options, cell, round(room), flags) as server:
            async with new_session() as session:
                pause_s = _pause_s(
                    model, load, cell, prompt_tokens(load, all_walks, model.overhead)
                )
                client = WorkflowClient(session, server.url, load, pause_s, cell.hints)
                done = await client.run(all_walks, cell.concurrency)
                stats = await daemon_stats(session, server.url)
        counted: dict[str, list[float]] = json.loads(spent.read_text())
    return _outcome(client, done, stats, counted)


def _pause_s(model: ServedModel, load: WorkflowLoad, cell: WorkflowCell, n_behind: float) -> float:
    """What a tool takes on average. n_behind: mean length of a prompt behind its base, in tokens."""
    n_evaluated = (1 - _FOUND) * (load.app_words + load.base_words + n_behind)
    service_s = n_evaluated / model.tokens_per_s + load.reply_tokens / model.replied_per_s
    return (cell.concurrency / BUSY - 1) * service_s


def _outcome(
    client: WorkflowClient, done: Any, stats: dict[str, Any], counted: dict[str, list[float]]
) -> CellOutcome:
    engine, tiers = stats["engine"], stats["tiers"]
    return CellOutcome(
        done,
        client.busy,
        engine["bytes_in"] + engine["bytes_out"] + tiers["bytes_written"],
        tiers["prefetched_bytes"],
        tiers["prefetched_bytes_used"],
        counted,
    )


def _server(
    model: Path,
    folder: Path,
    options: Path,
    cell: WorkflowCell,
    room: int,
    flags: tuple[str, ...],
) -> ServerProcess:
    """A daemon with few live sequences, so that only the policy decides what is kept."""
    own = {
        "-c": _CTX,
        "--live-tokens": _LIVE_CHATS * _CTX,
        "--live-sequences": _LIVE_CHATS,
        "-np": 1,
        "--policy": cell.policy,
        "--hot-bytes": room,
        "--warm-bytes": room,
        "--fidelity": "exact",
        "--prefetch-bytes": _PREFETCH_BYTES if cell.prefetch else 0,
    }
    words = [str(word) for pair in own.items() for word in pair]
    program = (str(own_server.__file__), str(options))
    where = folder / "store"
    return towerd_process("-m", str(model), store=where, flags=[*words, *flags], program=program)
