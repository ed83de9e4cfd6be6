"""`towerctl bench concurrency`: generated tokens per second at 1 to 8 streams, against
llama-server with the same flags."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from towerd.cli.bench.harness.client import complete, new_session
from towerd.cli.bench.harness.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, llama_server, towerd_server

_STREAMS = (1, 2, 4, 8)
_SPECULATING = (
    *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "4"),
    *("--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "8"),
)
_SPECULATED_STREAMS = (1, 8)
_PROMPT_TOKENS = 32
_REPEATS = 2


async def run(model: Path | None, quick: bool) -> Report:
    """Both servers, one after the other, on the same requests."""
    path = bench_model(model, "small" if quick else "1b")
    n_vocab, n_predict = vocab_size(path), 32 if quick else 48
    # By default towerd uses no flash attention on a CPU, which suits one long conversation. For
    # many short ones flash attention is faster, so both servers get it here.
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
    await _speculate(report, path, flags, 3 * n_predict, n_vocab)
    return report


async def _speculate(
    report: Report, path: Path, flags: tuple[str, ...], n_predict: int, n_vocab: int
) -> None:
    """The same with drafts from n-grams, for replies that repeat one token: every draft is right,
    so that the comparison is of drafting, verifying and sending."""
    shape = n_predict, n_vocab, _SPECULATED_STREAMS
    repeats: dict[str, Any] = {"logit_bias": [[n_vocab - 1, 100.0]]}
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "store", *flags, *_SPECULATING) as server:
            ours = await _rates(server, *shape, **repeats)
    with llama_server(path, *flags, "-kvu", *_SPECULATING) as server:
        theirs = await _rates(server, *shape, **repeats)
    for n in _SPECULATED_STREAMS:
        report.figures[f"towerd_spec_{n}_tokens_per_s"] = ours[n]
        report.figures[f"llama_server_spec_{n}_tokens_per_s"] = theirs[n]
        report.figures[f"ratio_spec_{n}"] = ours[n] / theirs[n]
    report.target("ratio_spec_1", least=1.0)


async def _rates(
    server: ServerProcess,
    n_predict: int,
    n_vocab: int,
    streams: tuple[int, ...] = _STREAMS,
    **fields: Any,
) -> dict[int, float]:
    """Best of some repeats: generated tokens per second, excluding prompts."""
    rng = np.random.default_rng(3)
    rates: dict[int, float] = {}
    async with new_session() as session:
        await complete(session, server.url, random_prompt(rng, 16, n_vocab).tolist(), 8)
        for n in streams:
            tries = [
                await _one(session, server, n, n_predict, n_vocab, rng, **fields)
                for _ in range(_REPEATS)
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
    **fields: Any,
) -> float:
    prompts = [random_prompt(rng, _PROMPT_TOKENS, n_vocab).tolist() for _ in range(n_streams)]
    for prompt in prompts:  # the prompts are cached, so that only generation is timed
        await complete(session, server.url, prompt, 0)
    started = time.perf_counter()
    await asyncio.gather(
        *(complete(session, server.url, prompt, n_predict, **fields) for prompt in prompts)
    )
    return n_streams * n_predict / (time.perf_counter() - started)
