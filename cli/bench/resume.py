"""`towerctl bench resume`: how fast a stored conversation comes back, against its prefill.

The session is warm (in the store's files) and not live: the daemon is restarted before every
trial. The floor is what nobody can beat: one memcpy of the rows and one decode step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from towerd.cli.bench.client import complete, new_session
from towerd.cli.bench.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.report import Report
from towerd.cli.bench.servers import ServerProcess, towerd_server

_TRIALS = 5
_RATIO_MIN = {2048: 350.0, 8192: 1000.0}


async def run(model: Path | None, quick: bool, tokens: int) -> Report:
    """Measure; `tokens` is the session's length."""
    path = bench_model(model, "small" if quick else "1b")
    n_vocab = vocab_size(path)
    rng = np.random.default_rng(1)
    report = Report("resume", path.name)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        ctx = str(-(-(tokens + 64) // 256) * 256)
        server = towerd_server(path, Path(folder) / "store", "-c", ctx)
        with server:
            prompt = random_prompt(rng, tokens + 1, n_vocab).tolist()
            await _measure(report, server, prompt, tokens)
    return report


async def _measure(report: Report, server: ServerProcess, prompt: list[int], tokens: int) -> None:
    warm_up = prompt[-1:] + prompt[:31]
    async with new_session() as session:
        await complete(session, server.url, warm_up, 8)
        cold = await complete(session, server.url, prompt[:tokens], 1)
    resumes, decodes, starts, warm, moved = [], [], [], 0, 0
    for _ in range(_TRIALS):
        server.stop()
        starts.append(server.start())
        async with new_session() as session:
            await complete(session, server.url, warm_up, 8)
            # One new token after the stored ones, so that the first step decodes exactly it.
            again = await complete(session, server.url, prompt, 12)
            resumes.append(again.ttft_s)
            decodes.append(float(again.timings["predicted_per_token_ms"]) / 1e3)
            reuse = again.final["towerd"]["reuse"]
            warm = int(reuse["warm"]) + int(reuse["hot"])
            async with session.get(f"{server.url}/towerd/v1/stats") as reply:
                moved = int((await reply.json())["engine"]["bytes_in"])
    memcpy_s = _memcpy_s(moved)
    resume_s, decode_s = statistics.median(resumes), statistics.median(decodes)
    report.figures |= {
        "tokens": tokens,
        "tokens_from_store": warm,
        "prefill_s": cold.ttft_s,
        "resume_s": resume_s,
        "resume_s_max": max(resumes),
        "ratio": cold.ttft_s / resume_s,
        "bytes_moved": moved,
        "memcpy_s": memcpy_s,
        "decode_step_s": decode_s,
        "over_floor": resume_s / (memcpy_s + decode_s),
        "start_s": statistics.median(starts),
    }
    if tokens in _RATIO_MIN and "1b" in report.model:
        report.target("ratio", least=_RATIO_MIN[tokens])
    report.target("over_floor", most=1.2)


def _memcpy_s(n_bytes: int) -> float:
    """Seconds that one warmed-up copy of `n_bytes` takes on one core (median of 9)."""
    source = np.ones(n_bytes, np.uint8)
    target = np.ones(n_bytes, np.uint8)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
