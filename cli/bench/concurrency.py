"""`towerctl bench concurrency`: generated tokens a second at 1 to 8 streams, against
llama-server with the same flags."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np

from towerd.cli.bench.client import complete, new_session
from towerd.cli.bench.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.report import Report
from towerd.cli.bench.servers import ServerProcess, llama_server, towerd_server

_STREAMS = (1, 2, 4, 8)
_PROMPT_TOKENS = 32
_REPEATS = 2


async def run(model: Path | None, quick: bool) -> Report:
    """Both servers, one after the other, on the same requests."""
    path = bench_model(model, "small" if quick else "1b")
    n_vocab, n_predict = vocab_size(path), 32 if quick else 48
    # Left to itself towerd does without flash attention on a CPU, which suits one long
    # conversation; for many short ones it is the faster, and both get it here.
    flags = ("-c", "4096", "-np", "8", "-fa", "on")
    report = Report("concurrency", path.name)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "store", *flags) as server:
            ours = await _rates(server, n_predict, n_vocab)
    with llama_server(path, *flags, "-kvu") as server:
        theirs = await _rates(server, n_predict, n_vocab)
    for n in _STREAMS:
        report.figures[f"towerd_{n}_tokens_per_s"] = ours[n]
        report.figures[f"llama_server_{n}_tokens_per_s"] = theirs[n]
        report.figures[f"ratio_{n}"] = ours[n] / theirs[n]
    report.target("ratio_8", least=0.95)
    return report


async def _rates(server: ServerProcess, n_predict: int, n_vocab: int) -> dict[int, float]:
    """Best of some repeats: tokens per second of generation, prompts excluded."""
    rng = np.random.default_rng(3)
    rates: dict[int, float] = {}
    async with new_session() as session:
        await complete(session, server.url, random_prompt(rng, 16, n_vocab).tolist(), 8)
        for n in _STREAMS:
            tries = [
                await _one(session, server, n, n_predict, n_vocab, rng) for _ in range(_REPEATS)
            ]
            rates[n] = max(tries)
    return rates


async def _one(
    session: aiohttp.ClientSession,
    server: ServerProcess,
    n_streams: int,
    n_predict: int,
    n_vocab: int,
    rng: np.random.Generator,
) -> float:
    prompts = [random_prompt(rng, _PROMPT_TOKENS, n_vocab).tolist() for _ in range(n_streams)]
    for prompt in prompts:  # the prompts are cached, so that only generation is timed
        await complete(session, server.url, prompt, 0)
    started = time.perf_counter()
    await asyncio.gather(*(complete(session, server.url, prompt, n_predict) for prompt in prompts))
    return n_streams * n_predict / (time.perf_counter() - started)
