"""`towerctl bench resume`: how fast a stored conversation resumes, against its prefill.

The session is warm (in the store's files) and not live: the daemon is restarted before every
trial. The floor is a lower bound for any implementation: one memcpy of the rows and one decode
step.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from towerd.cli.bench.harness.client import complete, daemon_stats, new_session
from towerd.cli.bench.harness.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, towerd_server
from towerd.errors import TowerdError

_TRIALS = 5
_PAIRS = 9
_SHRINK_S_MAX = 60.0
_RATIO_MIN = {2048: 350.0, 8192: 1000.0}


async def run(
    model: Path | None, quick: bool, tokens: int, level_formats: str | None, encrypt: bool
) -> Report:
    """Measure a session of `tokens` tokens. With `level_formats` it is measured as computed first,
    then in these formats; with `encrypt`, in turns with a store that is encrypted."""
    path = bench_model(model, "small" if quick else "1b")
    n_vocab = vocab_size(path)
    rng = np.random.default_rng(1)
    report = Report("resume", path.name)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        flags = ["-c", str(-(-(tokens + 64) // 256) * 256)]
        prompt = random_prompt(rng, tokens + 1, n_vocab).tolist()
        store = Path(folder) / "store"
        with towerd_server(path, store, *flags, "--fidelity", "exact") as server:
            await _measure(report, server, prompt, tokens)
            if encrypt:
                sealed = ("--encrypt", f"file:{folder}/key", "--fidelity", "exact")
                with towerd_server(
                    path, Path(folder) / "encrypted" / "store", *flags, *sealed
                ) as other:
                    await _measure_encrypted(report, server, other, prompt, tokens)
        if level_formats is not None:
            flags += ["--level-formats", level_formats, "--shrink-after", "0"]
            with towerd_server(path, store, *flags) as server:
                await _measure_stored(report, server, prompt, level_formats)
    return report


async def _measure_encrypted(
    report: Report, plain: ServerProcess, sealed: ServerProcess, prompt: list[int], tokens: int
) -> None:
    """Measure the same session in an encrypted store, in turns with the plain one."""
    async with new_session() as session:
        await complete(session, sealed.url, _warm_up(prompt), 8)
        await complete(session, sealed.url, prompt[:tokens], 1)
    both: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_PAIRS):
        for is_sealed, server in ((False, plain), (True, sealed)):
            trial = await _resumes(server, prompt, 1)
            server.stop()
            both[is_sealed] += trial.resumes
    plain_s, sealed_s = statistics.median(both[False]), statistics.median(both[True])
    report.figures |= {
        "plain_resume_s": plain_s,
        "encrypted_resume_s": sealed_s,
        "encrypted_over_plain": sealed_s / plain_s,
    }
    report.target("encrypted_over_plain", most=1.15)


async def _measure_stored(
    report: Report, server: ServerProcess, prompt: list[int], level_formats: str
) -> None:
    """Measure the same session after its rows were converted to stored formats."""
    started = time.monotonic()
    async with new_session() as session:
        while not (await daemon_stats(session, server.url))["tiers"]["segments_shrunk"]:
            if time.monotonic() - started > _SHRINK_S_MAX:
                raise TowerdError(f"Nothing was stored in {level_formats}; is it native?")
            await asyncio.sleep(0.2)
    trials = await _resumes(server, prompt)
    report.figures |= {
        "level_formats": level_formats,
        "tokens_approximate": trials.n_approximate,
        "stored_resume_s": statistics.median(trials.resumes),
        "over_native": statistics.median(trials.resumes) / report.figures["resume_s"],
    }
    report.target("over_native", most=1.5)


@dataclass(slots=True)
class _Trials:
    """The times of each trial, which is a restart and a resume."""

    resumes: list[float] = field(default_factory=list)
    decodes: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    n_stored: int = 0
    n_approximate: int = 0
    n_bytes: int = 0


async def _resumes(server: ServerProcess, prompt: list[int], n_trials: int = _TRIALS) -> _Trials:
    trials = _Trials()
    for _ in range(n_trials):
        server.stop()
        trials.starts.append(server.start())
        async with new_session() as session:
            await complete(session, server.url, _warm_up(prompt), 8)
            # One new token after the stored ones, so that the first step decodes exactly it.
            again = await complete(session, server.url, prompt, 12)
            trials.resumes.append(again.ttft_s)
            trials.decodes.append(float(again.timings["predicted_per_token_ms"]) / 1e3)
            reuse = again.final["towerd"]["reuse"]
            trials.n_stored = int(reuse["warm"]) + int(reuse["hot"])
            trials.n_approximate = int(reuse.get("approximate", 0))
            trials.n_bytes = int((await daemon_stats(session, server.url))["engine"]["bytes_in"])
    return trials


def _warm_up(prompt: list[int]) -> list[int]:
    return prompt[-1:] + prompt[:31]


async def _measure(report: Report, server: ServerProcess, prompt: list[int], tokens: int) -> None:
    async with new_session() as session:
        await complete(session, server.url, _warm_up(prompt), 8)
        cold = await complete(session, server.url, prompt[:tokens], 1)
    trials = await _resumes(server, prompt)
    memcpy_s = _memcpy_s(trials.n_bytes)
    resume_s, decode_s = statistics.median(trials.resumes), statistics.median(trials.decodes)
    report.figures |= {
        "tokens": tokens,
        "tokens_from_store": trials.n_stored,
        "prefill_s": cold.ttft_s,
        "resume_s": resume_s,
        "resume_s_max": max(trials.resumes),
        "ratio": cold.ttft_s / resume_s,
        "bytes_moved": trials.n_bytes,
        "memcpy_s": memcpy_s,
        "decode_step_s": decode_s,
        "over_floor": resume_s / (memcpy_s + decode_s),
        "start_s": statistics.median(trials.starts),
    }
    if tokens in _RATIO_MIN and "1b" in report.model:
        report.target("ratio", least=_RATIO_MIN[tokens])
    report.target("over_floor", most=1.2)


def _memcpy_s(n_bytes: int) -> float:
    """Seconds for one warmed-up copy of `n_bytes` on one core (median of 9)."""
    source = np.ones(n_bytes, np.uint8)
    target = np.ones(n_bytes, np.uint8)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
