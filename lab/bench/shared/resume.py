"""`towerctl bench shared`: a chat continues on another machine, through an object store.

Machine A, a daemon with a store of its own, evaluates a chat and pushes it to a real S3 server on this machine.
Machine B is another daemon of the same model, with an empty store each time, which gets the prompt and nothing
else: it finds the chat's rows by their tokens. Beside that the plain client of the object store copies the same bytes
into memory, one object after the other, in turns with B. At the end the server is killed while B runs: it evaluates.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from lab.bench.shared.bucket_size import measure_bucket
from lab.bench.shared.s3_server import S3Server, s3_server
from towerd.cli.bench.harness.client import Completion, complete, new_session
from towerd.cli.bench.harness.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, towerd_server
from towerd.errors import TowerdError
from towerd.tiers.shared.sealing import FILE_NAME

TOKENS = 2048
_REPLY = 8
TRIALS, QUICK_TRIALS = 5, 3
WARM_UP = 96
"""Tokens of a prompt before, enough for the daemon to learn how fast it evaluates."""
_PUSHED_S_MAX = 120.0


@dataclass(slots=True)
class _Resumed:
    """Of each trial."""

    resumes: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    n_fetched: int = 0
    """Tokens whose rows came from the bucket, in the trial with the fewest."""
    n_bytes: int = 0
    are_same: bool = True
    """Whether every reply was that of machine A."""


async def run(model: Path | None, quick: bool) -> Report:
    """Measure a chat of 2,048 tokens, and what many chats take in a bucket."""
    path = bench_model(model, "small" if quick else "1b")
    report = Report("shared", path.name)
    rng = np.random.default_rng(1)
    prompt = random_prompt(rng, TOKENS + 1, vocab_size(path)).tolist()
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as name:
        folder = Path(name)
        with s3_server(folder / "s3") as s3, _environment(s3.env):
            machines = _Machines(path, folder, s3)
            await _measure(report, machines, prompt, QUICK_TRIALS if quick else TRIALS)
        await measure_bucket(report, folder)
    return report


@dataclass(frozen=True, slots=True)
class _Machines:
    """Daemons of one model that share a bucket."""

    model: Path
    folder: Path
    s3: S3Server

    @property
    def key(self) -> Path:
        """That machine A made."""
        return self.folder / "a" / FILE_NAME

    @contextmanager
    def one(self, name: str) -> Iterator[ServerProcess]:
        """A daemon with an empty store, which is deleted at the end unless it is machine A's."""
        flags = ["-c", str(TOKENS + 256), "--fidelity", "exact", "--shared", self.s3.url]
        flags += ["--shared-key", str(self.key)] if self.key.exists() else []
        store = self.folder / name
        with towerd_server(self.model, store, *flags) as server:
            yield server
        if store != self.key.parent:
            shutil.rmtree(store)


async def _measure(report: Report, machines: _Machines, prompt: list[int], n_trials: int) -> None:
    async with new_session() as session:
        with machines.one("a") as server:
            await _warm_up(session, server, prompt)
            cold = await complete(session, server.url, prompt[:-1], 1)
            await _push(session, server, len(prompt) - 2)
            expected = await complete(session, server.url, prompt, _REPLY)
        trials = _Resumed(n_fetched=len(prompt))
        for number in range(n_trials):
            with machines.one(f"b{number}") as server:
                await _warm_up(session, server, prompt)
                resumed = await complete(session, server.url, prompt, _REPLY)
                _add(trials, resumed, expected)
            trials.n_bytes, copy_s = await asyncio.to_thread(_copy, machines.s3)
            trials.copies.append(copy_s)
        with machines.one("without") as server:
            await _warm_up(session, server, prompt)
            machines.s3.kill()
            without = await complete(session, server.url, prompt, _REPLY)
            _add_figures(report, cold, trials)
            report.figures |= {
                "server_gone_s": without.ttft_s,
                "server_gone_wait_s": without.ttft_s - without.timings["prompt_ms"] / 1e3,
                "server_gone_over_prefill": without.ttft_s / cold.ttft_s,
            }


def _add(trials: _Resumed, resumed: Completion, expected: Completion) -> None:
    trials.resumes.append(resumed.ttft_s)
    trials.steps.append(float(resumed.timings["predicted_per_token_ms"]) / 1e3)
    reuse: Mapping[str, Any] = resumed.final["towerd"]["reuse"]
    trials.n_fetched = min(trials.n_fetched, int(reuse["warm"]) + int(reuse["hot"]))
    trials.are_same &= resumed.tokens == expected.tokens


def _add_figures(report: Report, cold: Completion, trials: _Resumed) -> None:
    """Ratios are of each trial and its copy; of them the median, and the best."""
    pairs = list(zip(trials.resumes, trials.copies, strict=True))
    over_copy = [resume_s / copy_s for resume_s, copy_s in pairs]
    over_floor = [
        resume_s / (copy_s + step_s)
        for (resume_s, copy_s), step_s in zip(pairs, trials.steps, strict=True)
    ]
    resume_s = statistics.median(trials.resumes)
    report.figures |= {
        "tokens": TOKENS,
        "tokens_from_bucket": trials.n_fetched,
        "same_reply": trials.are_same,
        "prefill_s": cold.ttft_s,
        "resume_s": resume_s,
        "resume_s_min": min(trials.resumes),
        "ratio": cold.ttft_s / resume_s,
        "bytes_copied": trials.n_bytes,
        "copy_s": statistics.median(trials.copies),
        "vs_copy": statistics.median(over_copy),
        "vs_copy_min": min(over_copy),
        "decode_step_s": statistics.median(trials.steps),
        "vs_copy_and_step": statistics.median(over_floor),
        "vs_copy_and_step_min": min(over_floor),
    }
    if "1b" in report.model:
        report.target("ratio", least=50)
    report.target("vs_copy", most=1.3)


async def _warm_up(
    session: aiohttp.ClientSession, server: ServerProcess, prompt: list[int]
) -> None:
    await complete(session, server.url, prompt[-1:] + prompt[: WARM_UP - 1], _REPLY)


async def _push(session: aiohttp.ClientSession, server: ServerProcess, n_rows: int) -> None:
    """Push the longest chat with at least so many rows, which may still be on their way to the disk. Raises
    TowerdError."""
    own, began = f"{server.url}/towerd/v1", time.monotonic()
    async with session.get(f"{own}/sessions") as reply:
        listed = (await reply.json())["sessions"]
    id = max(listed, key=lambda each: int(each["n_tokens"]))["id"]
    while time.monotonic() - began < _PUSHED_S_MAX:
        async with session.post(f"{own}/shared/push", json={"session": id}) as reply:
            said = await reply.json()
        if reply.status != 200:
            raise TowerdError(f"The chat was not pushed: {said}")
        if said["rows"] >= n_rows:
            return
        await asyncio.sleep(0.2)
    raise TowerdError("The rows of the chat did not come to the disk.")


def _copy(s3: S3Server) -> tuple[int, float]:
    """Read every object of rows with the plain client; bytes and seconds."""
    import obstore
    from obstore.store import from_url

    store = from_url(s3.url, client_options={"allow_http": True})
    places = [each["path"] for each in obstore.list(store, "objects").collect()]
    began = time.perf_counter()
    n_bytes = sum(len(obstore.get(store, place).bytes()) for place in places)
    return n_bytes, time.perf_counter() - began


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Variables for the daemons and the client here."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
