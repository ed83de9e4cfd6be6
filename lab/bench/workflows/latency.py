"""`towerctl bench workflows`: agents that work together, in a cache with room for a part of what they use."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from lab.bench.workflows import server as own_server
from lab.bench.workflows.client import ServedModel, ServedWorkflow, WorkflowClient, probe
from lab.bench.workflows.load import WorkflowLoad, distinct_tokens, prompt_tokens, walks
from towerd.cli.bench.harness.client import daemon_stats, new_session
from towerd.cli.bench.harness.servers import ServerProcess, towerd_process, towerd_server

BUSY = 0.5
_CTX = 1024


@dataclass(frozen=True, slots=True)
class WorkflowCell:
    """What is served, and with which memory. share: of all distinct tokens, what RAM and disk each hold."""

    policy: str
    hints: bool = True
    share: float = 0.1
    concurrency: int = 4
    prefetch: bool = True


@dataclass(slots=True)
class CellOutcome:
    """One run of a cell. costs: CPU seconds and numbers of the decisions."""

    workflows: list[ServedWorkflow]
    busy: float
    stats: dict[str, Any] = field(default_factory=dict)


def vocabulary_words(path: Path) -> tuple[str, ...]:
    """Words that are one token each at least where a space stands before them."""
    field = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    assert field is not None
    pieces: list[str] = field.contents()
    bare = [piece[1:] for piece in pieces if piece[:1] in ("\u2581", "\u0120")]
    return tuple(word for word in bare if word.isascii() and word.isalpha() and len(word) > 2)


async def probed(path: Path, load: WorkflowLoad) -> ServedModel:
    words = vocabulary_words(path)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "probe", "-c", str(_CTX)) as server:
            async with new_session() as session:
                return await probe(session, server.url, path, words, load)


async def drive(model: ServedModel, load: WorkflowLoad, cell: WorkflowCell, seed: int) -> CellOutcome:
    """Run one cell with the workflows of a seed."""
    all_walks = walks(load, model.words, seed)
    room = cell.share * distinct_tokens(load, all_walks, model.overhead) * model.token_bytes
    evaluated = prompt_tokens(load, all_walks, model.overhead) / 2 + load.base_words / 2
    service_s = evaluated / model.tokens_per_s + load.reply_tokens / model.replied_per_s
    pause_s = max(0.0, cell.concurrency / BUSY - 1) * service_s
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        options = Path(folder) / "options.json"
        options.write_text(json.dumps({"walks": {w.name: w.agents for w in all_walks}}))
        with _server(model.path, Path(folder), options, cell, round(room)) as server:
            async with new_session() as session:
                client = WorkflowClient(session, server.url, load, pause_s, cell.hints)
                done = await client.run(all_walks, cell.concurrency)
                stats = await daemon_stats(session, server.url)
    return CellOutcome(done, _busy(client.spans_s), stats)


def _server(
    model: Path, folder: Path, options: Path, cell: WorkflowCell, room: int
) -> ServerProcess:
    flags = {
        "-c": _CTX,
        "--live-tokens": _CTX,
        "--live-sequences": 1,
        "-np": 1,
        "--policy": cell.policy,
        "--hot-bytes": room,
        "--warm-bytes": room,
        "--fidelity": "exact",
        **({} if cell.prefetch else {"--prefetch-bytes": 0}),
    }
    words = [str(word) for pair in flags.items() for word in pair]
    program = (str(own_server.__file__), str(options))
    return towerd_process("-m", str(model), store=folder / "store", flags=words, program=program)


def _busy(spans_s: list[tuple[float, float]]) -> float:
    """Share of the time in which any request was waiting or served."""
    spans_s = sorted(spans_s)
    first_s = until_s = spans_s[0][0]
    busy_s = 0.0
    for start_s, end_s in spans_s:
        busy_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return busy_s / (until_s - first_s)
