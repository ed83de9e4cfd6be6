"""`towerctl bench soak`: thousands of short requests at a daemon whose budgets are far too small.

Eight clients send prompts that are distinct, share a beginning with an earlier one, or continue it,
so that segments are constantly made, split, evicted from RAM and from disk, and read back. Some
replies are streamed, some are not, and some clients leave early. The daemon's resource use is
sampled while it runs: it must not grow with the number of requests.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from lab.bench.processes import vitals
from towerd.cli.bench.harness.client import daemon_stats
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, towerd_server
from towerd.models.bundled import bundled_model
from towerd.settings.setting import parse_size
from towerd.store import Store, latest_row_identity

REQUESTS = 10_000
REQUESTS_QUICK = 500
CLIENTS = 8
FLAGS = ("--ctx-size", "512", "--hot-bytes", "32M", "--warm-bytes", "64M")
FLAGS_QUICK = ("--ctx-size", "512", "--hot-bytes", "16M", "--warm-bytes", "32M")
REPLY_TOKENS = 8
WORDS = (12, 120)
"""Words of a prompt. The bundled model has two to three times as many tokens, so that the rows of
some hundreds of requests fill each budget, and the longest prompt fits the context."""
ANSWER_S_MAX = 60.0
FAILURES_MAX = 5
"""After this many failures the daemon counts as broken."""
RSS_MB_MAX = 4096
"""A daemon that takes more is stopped before it takes all memory of the machine."""
RSS_KB_MAX = 4.0
"""RSS for each further request in the second half; what a turn leaves in the prefix tree is part of it."""
RAM_OF_MAX = 1.05
"""The most that a daemon with a --ram-max took, over that."""
FDS_MORE_MAX = 8
THREADS_MORE_MAX = 4
"""What the second half may have more than the first."""
JUDGED_MIN = 1000
"""With fewer requests the caches still fill, and growth says nothing."""
TOLD_S = 60.0
"""Progress is told this often where nobody watches a terminal."""
SAMPLE_S = 1.0
SAMPLES_SHOWN = 12
_WORDS = (
    "Once upon a time there was little girl boy dog bird tree house river garden cake friend"
    " happy sad big red blue small mother said wanted to play with found lost ran away home"
).split()


@dataclass(frozen=True, slots=True)
class SoakSample:
    """The daemon's resource use at one moment."""

    at_s: float
    done: int
    rss_mb: float
    fds: int
    threads: int
    hot_mb: float
    warm_mb: float
    segments: int


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request. leaves: the client leaves after the first event."""

    prompt: str
    streams: bool
    leaves: bool


@dataclass(slots=True)
class SoakRun:
    """All requests of one run, and their outcomes."""

    requests: Iterator[SoakRequest]
    recent: deque[str]
    """Recent prompts with their replies, to continue from."""
    done: int = 0
    left: int = 0
    """Those of the done requests whose clients left early."""
    errors: list[str] = field(default_factory=list)
    stopped: str = ""
    """Why the run ended early."""
    samples: list[SoakSample] = field(default_factory=list)

    def failed(self, error: str) -> None:
        """Count a failure; too many end the run."""
        self.errors.append(error)
        if len(self.errors) >= FAILURES_MAX:
            self.stopped = f"{len(self.errors)} requests failed, the last one: {error}"


def new_load(n: int, seed: int = 0) -> SoakRun:
    """`n` requests, the same in every run except for the replies that some of them continue."""
    recent: deque[str] = deque(maxlen=64)
    return SoakRun(_requests(n, np.random.default_rng(seed), recent), recent)


def _requests(n: int, rng: np.random.Generator, recent: deque[str]) -> Iterator[SoakRequest]:
    for number in range(n):
        words = [str(word) for word in rng.choice(_WORDS, int(rng.integers(*WORDS)))]
        kind = rng.random()
        before = recent[int(rng.integers(len(recent)))].split() if recent else []
        if before and kind < 0.3:  # diverges within a stored segment
            words = before[: int(rng.integers(len(before)))] + words
        elif before and kind < 0.4:  # the next turn
            words = before + words
        else:
            words = [f"{number:x}", *words]
        prompt = " ".join(words[: WORDS[1]])
        yield SoakRequest(prompt, bool(rng.random() < 0.6), bool(rng.random() < 0.1))


async def run(model: Path | None, quick: bool, ram_max: str | None = None) -> Report:
    """Send all requests to one daemon on a store of its own. ram_max: its --ram-max; None: its default"""
    path = model or bundled_model()
    n = REQUESTS_QUICK if quick else REQUESTS
    load = new_load(n)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        root = Path(folder) / "store"
        flags: tuple[str, ...] = FLAGS_QUICK if quick else FLAGS
        flags += () if ram_max is None else ("--ram-max", ram_max)
        with towerd_server(path, root, *flags) as server:
            stats = await press(server, load)
        seconds = time.monotonic() - began
        if not load.stopped:
            with Store.open(root, latest_row_identity) as store:
                store.check_integrity()
    show(load.samples)
    report = report_of(path.name, load, stats, seconds)
    if ram_max is not None:
        most = max(stats.get("ram_bytes_peak", 0), int(1e6 * report.figures["rss_mb_max"]))
        report.figures["ram_of_max"] = most / parse_size(ram_max, "--ram-max")
        report.target("ram_of_max", most=RAM_OF_MAX)
    return report


def report_of(model: str, load: SoakRun, stats: dict[str, Any], seconds: float) -> Report:
    """The figures of one run."""
    report, samples = Report("soak", model), load.samples
    half = len(samples) // 2
    first, later = samples[: half + 1], samples[half:]
    report.figures |= {
        "done": load.done,
        "failed": len(load.errors),
        "left_early": load.left,
        "seconds": seconds,
        "rss_mb_start": samples[0].rss_mb,
        "rss_mb_half": later[0].rss_mb,
        "rss_mb_max": max(sample.rss_mb for sample in samples),
        "rss_kb_per_request": slope(later) * 1e3,
        "fds_max": max(sample.fds for sample in samples),
        "fds_more": max(each.fds for each in later) - max(each.fds for each in first),
        "threads_max": max(sample.threads for sample in samples),
        "threads_more": max(each.threads for each in later) - max(each.threads for each in first),
        "hot_mb_max": max(sample.hot_mb for sample in samples),
        "warm_mb_max": max(sample.warm_mb for sample in samples),
        "hot_evictions": stats.get("hot_evictions", 0),
        "warm_evictions": stats.get("warm_evictions", 0),
        "segments": samples[-1].segments,
    }
    if load.stopped:
        report.figures["stopped"] = load.stopped
    report.details["samples"] = [asdict(sample) for sample in thinned(samples)]
    report.target("failed", most=0)
    if load.done >= JUDGED_MIN:
        report.target("rss_kb_per_request", most=RSS_KB_MAX)
        report.target("fds_more", most=FDS_MORE_MAX)
        report.target("threads_more", most=THREADS_MORE_MAX)
    for key in ("hot_evictions", "warm_evictions"):
        report.target(key, least=1)
    return report


def slope(samples: Sequence[SoakSample]) -> float:
    """Megabytes of RSS for each further request, by least squares."""
    if len({sample.done for sample in samples}) < 2:
        return 0.0
    done, rss_mb = zip(*((sample.done, sample.rss_mb) for sample in samples), strict=True)
    return float(np.polyfit(done, rss_mb, 1)[0])


def thinned(samples: Sequence[SoakSample]) -> list[SoakSample]:
    """About SAMPLES_SHOWN of the samples, including the first and the last."""
    places = np.linspace(0, len(samples) - 1, min(SAMPLES_SHOWN, len(samples)))
    return [samples[round(place)] for place in places]


def show(samples: Sequence[SoakSample]) -> None:
    """Print the daemon's resource use over time."""
    table = Table(title="resource use of the daemon")
    names = list(SoakSample.__slots__)
    for name in names:
        table.add_column(name, justify="right")
    for sample in thinned(samples):
        table.add_row(*(f"{getattr(sample, name):,.0f}" for name in names))
    Console().print(table)


async def press(server: ServerProcess, load: SoakRun) -> dict[str, Any]:
    """Send all requests; returns the daemon's counters at the end."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        began = time.monotonic()
        await _look(session, server, load, began)
        sampling = asyncio.create_task(_keep_looking(session, server, load, began))
        await asyncio.gather(*(_client(session, server.url, load) for _ in range(CLIENTS)))
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
        await _look(session, server, load, began)
        with suppress(aiohttp.ClientError, TimeoutError):
            return await _stats(session, server.url)
    return {}


async def _client(session: aiohttp.ClientSession, url: str, load: SoakRun) -> None:
    """Send requests one after the other, until none are left or the run is stopped."""
    for request in load.requests:
        if load.stopped:
            return
        try:
            text = await _ask(session, url, request)
        except TimeoutError:
            load.failed(f"no answer within {ANSWER_S_MAX:.0f} s")
        except (aiohttp.ClientError, ValueError, LookupError) as error:
            load.failed(str(error) or type(error).__name__)
        else:
            load.done += 1
            load.left += request.leaves
            load.recent.append(request.prompt + text)


async def _ask(session: aiohttp.ClientSession, url: str, request: SoakRequest) -> str:
    """Send one request; returns the reply's text up to where the client left."""
    body = {
        "prompt": request.prompt,
        "n_predict": REPLY_TOKENS,
        "stream": request.streams or request.leaves,
        "ignore_eos": True,
    }
    text = ""
    async with session.post(f"{url}/completion", json=body) as reply:
        if reply.status != 200:
            raise ValueError(f"{reply.status}: {(await reply.text())[:200]}")
        if not body["stream"]:
            return str((await reply.json())["content"])
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            text += str(event["content"])
            if event["stop"] or request.leaves:
                return text
    raise ValueError("the stream ended before the reply did")


async def _keep_looking(
    session: aiohttp.ClientSession, server: ServerProcess, load: SoakRun, began: float
) -> None:
    told_s = began
    while not load.stopped:
        await asyncio.sleep(SAMPLE_S)
        await _look(session, server, load, began)
        if time.monotonic() - told_s >= TOLD_S and load.samples:
            told_s = time.monotonic()
            print(f"{load.done:,} requests, {load.samples[-1].rss_mb:,.0f} MB", file=sys.stderr)


async def _look(
    session: aiohttp.ClientSession, server: ServerProcess, load: SoakRun, began: float
) -> None:
    """Sample the daemon's resource use; stop the run if it is too high or the daemon has ended."""
    stats: dict[str, Any] = {}
    with suppress(aiohttp.ClientError, TimeoutError):
        stats = await _stats(session, server.url)
    found = vitals(server)
    if found is None:
        if server.exit_code() is not None:
            load.stopped = (
                f"the daemon ended by itself with {server.exit_code()}: {server.log_tail()}"
            )
        return
    rss_mb = found.rss_bytes / 1e6
    hot_mb, warm_mb = (stats.get(key, 0) / 1e6 for key in ("hot_bytes", "warm_bytes"))
    n_segments = stats.get("segments", 0)
    at_s = time.monotonic() - began
    load.samples.append(
        SoakSample(at_s, load.done, rss_mb, found.fds, found.threads, hot_mb, warm_mb, n_segments)
    )
    if rss_mb > RSS_MB_MAX:
        load.stopped = f"the daemon took {rss_mb:,.0f} MB"
        server.stop(signal.SIGKILL)


async def _stats(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    found = await daemon_stats(session, url)
    return {**found["store"], **found["tiers"], **found["ram"]}
