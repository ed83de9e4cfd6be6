"""`towerctl bench vllm`: time to the first token of a prompt whose rows are stored, against vLLM evaluating it, against
the ExampleConnector that comes with vLLM, and against LMCache.

Each engine is a process of its own, without vLLM's own prefix cache, on a model of random weights. `restart_s` is
the first such prompt of a new engine on the same store."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.vllm.engine_client import VllmEngine, VllmFailed, require_vllm, transfer_config
from lab.models.hf_llama import LlamaShape, write_hf_llama
from towerd.cli.bench.harness.report import Report

SMALL = LlamaShape()
FULL = LlamaShape(layers=12, hidden=768, heads=12, kv_heads=4, inner=2048, vocab=8000)
TIMES = 3
WAIT_S = 60.0
CHUNK = 256
"""Tokens of LMCache's chunks, its default."""
ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class KvRival:
    """One way to keep rows."""

    name: str
    config: Mapping[str, Any] | None
    """vLLM's --kv-transfer-config; None: nothing is kept."""
    environment: Mapping[str, str] = field(default_factory=dict)


async def run(model: Path | None, quick: bool, python: str, tokens: int) -> Report:
    """Measure each way. python: an interpreter with vLLM. Raises TowerdError."""
    require_vllm(python)
    shape = SMALL if quick else FULL
    report = Report("vllm", "llama of random weights")
    report.figures["tokens"] = tokens
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as name:
        folder = Path(name)
        path = write_hf_llama(folder / "model", shape)

        def start(rival: KvRival) -> VllmEngine:
            arguments: dict[str, Any] = {"max_model_len": tokens + 64}
            arguments["max_num_batched_tokens"] = arguments["max_model_len"]
            if rival.config is not None:
                arguments["kv_transfer_config"] = dict(rival.config)
            return VllmEngine(python, path, rival.environment, **arguments)

        _measure(report, start, _rivals(folder), _prompts(shape, tokens))
    report.target("ratio", least=10)
    return report


def _rivals(folder: Path) -> dict[str, KvRival]:
    (folder / "example").mkdir()
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    lmcache = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    settings = {
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "1.0",
    }
    return {
        "evaluate": KvRival("evaluate", None),
        "towerd": KvRival("towerd", transfer_config({"towerd.store_dir": str(folder / "store")})),
        "example": KvRival("example", example),
        "lmcache": KvRival("lmcache", lmcache, settings),
    }


def _prompts(shape: LlamaShape, tokens: int) -> list[list[int]]:
    """A prompt to warm up with, and those that are measured."""
    chance = random.Random(0)
    return [[chance.randrange(3, shape.vocab) for _ in range(tokens)] for _ in range(TIMES + 1)]


def _measure(
    report: Report,
    start: Callable[[KvRival], VllmEngine],
    rivals: Mapping[str, KvRival],
    prompts: Sequence[Sequence[int]],
) -> None:
    with start(rivals["evaluate"]) as engine:
        engine.ask(prompts[0])
        report.figures["evaluate_s"] = statistics.median(
            engine.ask(prompt)["seconds"] for prompt in prompts[1:]
        )
    for name in ("towerd", "example", "lmcache"):
        try:
            with start(rivals[name]) as engine:
                seconds, cached = _stored(engine, prompts)
        except VllmFailed as error:
            if name == "towerd":
                raise
            report.figures[f"{name}_error"] = error.message.strip().splitlines()[-1][:ERROR_CHARS]
            continue
        report.figures |= {f"{name}_s": seconds, f"{name}_cached": cached}
    with start(rivals["towerd"]) as engine:
        engine.ask(prompts[0])
        report.figures["restart_s"] = engine.ask(prompts[1])["seconds"]
    figures = report.figures
    figures["ratio"] = figures["evaluate_s"] / figures["towerd_s"]
    for name in ("example", "lmcache"):
        if f"{name}_s" in figures:
            figures[f"vs_{name}"] = figures["towerd_s"] / figures[f"{name}_s"]


def _stored(engine: VllmEngine, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """The median time of prompts that are stored, and how many tokens of them were, at least."""
    for prompt in prompts:
        engine.ask(prompt)
    until = time.monotonic() + WAIT_S
    for prompt in prompts:
        while engine.ask(prompt)["cached"] < len(prompt) - 2 * CHUNK:
            if time.monotonic() > until:
                raise VllmFailed(f"after {WAIT_S:g} s nothing was stored")
    found = [engine.ask(prompt) for prompt in prompts[1:]]
    return statistics.median(each["seconds"] for each in found), min(
        each["cached"] for each in found
    )
