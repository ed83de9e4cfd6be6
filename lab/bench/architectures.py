"""`towerctl bench resume --arch`: time to resume a stored session, for every architecture.

Models have random weights of one small shape. A session is random tokens or, where the name ends so, a
picture and random letters. llama-server's own slot save and restore is measured
on the same prompt: `llama_server_cache_n` is how much of the restored slot it reused.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import click

from lab.bench.prompts import SessionPrompt, picture_prompt, text_prompt
from lab.models.kept import random_model, random_projector
from lab.models.random_gguf import Shape
from lab.models.shape import Arch
from lab.models.vision import TINY, Kind, Tower
from towerd.cli.bench.harness.client import complete, daemon_stats, new_session
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, llama_server, towerd_server
from towerd.errors import TowerdError

ARCHS: tuple[Arch, ...] = (
    "llama",
    "gemma3",
    "gpt-oss",
    "cohere2",
    "mamba",
    "rwkv7",
    "lfm2",
    "granitehybrid",
    "jamba",
    "falcon-h1",
    "qwen35",
    "deepseek2",
    "qwen2vl",
    "qwen3vl",
)
PICTURES: dict[str, tuple[Arch, Kind]] = {
    "qwen3vl-picture": ("qwen3vl", "qwen3vl"),
    "qwen35-picture": ("qwen35", "qwen2vl"),
}
"""Architectures of which a session with a picture is measured, and the kind of their projector."""
_TOWER = Tower(384, 1536, 6, 6, side=512)
_SHAPE = Shape(12, 768, 12, 4, 2304, 8192, n_ctx_train=32768, window=512)
_QUICK = Shape(4, 256, 4, 2, 768, 2048, n_ctx_train=32768, window=128)
_TRIALS = 3
_RATIO_MIN = 100.0
_RATIO_TOKENS = 2048
"""The ratio is a target from this length on; --quick models are evaluated too fast for it."""
_OVERHEAD_MAX = 0.1
"""Bytes of state checkpoints for each byte of rows, for models without recurrent layers."""
_SLOT = "bench.bin"


async def run(model: None, quick: bool, arch: str, tokens: int) -> Report:
    """Measure one architecture or `all`, with a model of its own each; `tokens` is the session's
    length."""
    report = Report("resume", f"{arch}, random weights")
    rows: dict[str, Any] = {}
    for name in (*ARCHS, *PICTURES) if arch == "all" else (arch,):
        path, prompt, flags = _session(name, quick, tokens)
        click.echo(f"{name} ...", err=True)
        with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
            flags += ["-c", str(-(-(tokens + 64) // 256) * 256)]
            with towerd_server(path, Path(folder) / "store", *flags) as server:
                rows[name] = await _towerd(server, prompt, 1 if quick else _TRIALS)
            flags += ["-np", "1", "--slot-save-path", folder]
            with llama_server(path, *flags) as server:
                rows[name] |= await _llama_server(server, prompt)
    for name, row in rows.items():
        report.figures[name] = ", ".join(f"{key} {_short(value)}" for key, value in row.items())
    report.figures["tokens"] = tokens
    report.figures["ratio_min"] = min(row["ratio"] for row in rows.values())
    report.figures["reused_tokens_min"] = min(row["reused_tokens"] for row in rows.values())
    report.details = {str(name): row for name, row in rows.items()}
    if not quick and tokens >= _RATIO_TOKENS:
        report.target("ratio_min", least=_RATIO_MIN)
    sliced = [row["overhead"] for row in rows.values() if row["state_kind"] in ("dense", "window")]
    if sliced:
        report.figures["overhead_sliced_max"] = max(sliced)
        report.target("overhead_sliced_max", most=_OVERHEAD_MAX)
    return report


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _session(name: str, quick: bool, tokens: int) -> tuple[Path, SessionPrompt, list[str]]:
    """The GGUF that `name` stands for, written to the user's cache on first use, the session's prompt, and
    the flags that it takes. Raises TowerdError."""
    if name in PICTURES:
        arch, kind = PICTURES[name]
        model, tower = _model(name, arch, quick), TINY if quick else _TOWER
        n_embd = (_QUICK if quick else _SHAPE).n_embd
        projector = random_projector(f"{model.stem}-mmproj", n_embd, kind, tower)
        flags = ["--mmproj", str(projector), "--no-warmup"]
        return model, picture_prompt(model, tokens, tower), flags
    found = next((each for each in ARCHS if each == name), None)
    if found is None:
        raise TowerdError(f"--arch must be all or one of {', '.join((*ARCHS, *PICTURES))}.")
    model = _model(name, found, quick)
    return model, text_prompt(model, tokens), []


def _model(name: str, arch: Arch, quick: bool) -> Path:
    shape = replace(_QUICK if quick else _SHAPE, arch=arch)
    return random_model(f"arch-{name}-{'quick' if quick else 'small'}", shape)


async def _towerd(server: ServerProcess, prompt: SessionPrompt, n_trials: int) -> dict[str, Any]:
    """Prefill once; then restart and resume a few times."""
    await _wake(server, prompt)
    before = await _restarted(server)
    await _wake(server, prompt)
    async with new_session() as session:
        stored = await prompt.stored(session, server.url)
        cold = await complete(session, server.url, stored, 1)
    after = await _restarted(server)  # stopping writes what it has
    resumes: list[float] = []
    reused: list[int] = []
    stats: dict[str, Any] = {}
    for trial in range(n_trials):
        if trial:
            await _restarted(server)
        await _wake(server, prompt)
        async with new_session() as session:
            # One new token after the stored ones, so that the first step decodes exactly it.
            whole = await prompt.whole(session, server.url)
            again = await complete(session, server.url, whole, 4)
        resumes.append(again.ttft_s)
        reused.append(int(again.timings["cache_n"]))
        stats = await _stats(server)
    resume_s = statistics.median(resumes)
    return {
        "state_kind": stats["engine"]["state_kind"],
        "prefill_s": cold.ttft_s,
        "resume_s": resume_s,
        "ratio": cold.ttft_s / resume_s,
        "reused_tokens": min(reused),
        "bytes_moved": int(stats["engine"]["bytes_in"]),
        **_stored(before, after),
    }


def _stored(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The session's size on disk: bytes of rows, bytes of state checkpoints, and their ratio (0 for
    a model that keeps no rows)."""
    row_bytes = int(after["tiers"]["warm_bytes"]) - int(before["tiers"]["warm_bytes"])
    states = [int(each["engine"].get("boundary_bytes", 0)) for each in (before, after)]
    boundary_bytes = states[1] - states[0]
    overhead = boundary_bytes / row_bytes if row_bytes else 0.0
    return {"row_bytes": row_bytes, "boundary_bytes": boundary_bytes, "overhead": overhead}


async def _wake(server: ServerProcess, prompt: SessionPrompt, **fields: Any) -> None:
    """Warm up with a short prompt that shares nothing with the measured one."""
    async with new_session() as session:
        await complete(session, server.url, prompt.other, 4, **fields)


async def _restarted(server: ServerProcess) -> dict[str, Any]:
    server.stop()
    server.start()
    return await _stats(server)


async def _stats(server: ServerProcess) -> dict[str, Any]:
    async with new_session() as session:
        return await daemon_stats(session, server.url)


async def _llama_server(server: ServerProcess, prompt: SessionPrompt) -> dict[str, Any]:
    """llama-server's own mechanism: save the slot, restart, restore it, continue."""
    async with new_session() as session:
        stored = await prompt.stored(session, server.url)
        await complete(session, server.url, stored, 1, id_slot=0)
        await _slot(session, server, "save")
    server.stop()
    server.start()
    await _wake(server, prompt, id_slot=0)
    async with new_session() as session:
        restore_s = await _slot(session, server, "restore")
        whole = await prompt.whole(session, server.url)
        again = await complete(session, server.url, whole, 4, id_slot=0)
    return {
        "llama_server_restore_s": restore_s,
        "llama_server_resume_s": restore_s + again.ttft_s,
        "llama_server_cache_n": int(again.timings["cache_n"]),
    }


async def _slot(session: aiohttp.ClientSession, server: ServerProcess, action: str) -> float:
    """Save or restore the slot; returns the seconds it took."""
    url = f"{server.url}/slots/0?action={action}"
    started = time.perf_counter()
    async with session.post(url, json={"filename": _SLOT}) as reply:
        if reply.status != 200:
            raise TowerdError(f"llama-server could not {action} its slot: {await reply.text()}")
    return time.perf_counter() - started
