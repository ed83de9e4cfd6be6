"""Sends workflows to a daemon as agents do, and notes what came of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from lab.bench.busy import busy_share
from lab.bench.workflows.load import App, Message, Transcript, WorkflowLoad, WorkflowWalk
from towerd.cli.bench.harness.client import chat

_PROBES = 3


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A GGUF, and what it takes in the daemon on this machine. overhead: tokens of a message besides its
    words."""

    path: Path
    words: tuple[str, ...]
    token_bytes: float
    tokens_per_s: float
    replied_per_s: float
    overhead: float


@dataclass(frozen=True, slots=True)
class ServedStep:
    """One request as its client saw it. base_missed: whether fewer tokens were reused than its agent's base
    has; None: nobody had sent that base before."""

    ttft_s: float
    total_s: float
    n_prompt: int
    n_evaluated: int
    base_missed: bool | None


@dataclass(slots=True)
class ServedWorkflow:
    """A workflow that is over."""

    name: str
    is_measured: bool
    completion_s: float = 0.0
    steps: list[ServedStep] = field(default_factory=list)


@dataclass(slots=True)
class WorkflowClient:
    """Runs workflows, `concurrency` at a time. mean_pause_s: what a tool takes on average."""

    session: aiohttp.ClientSession
    url: str
    load: WorkflowLoad
    mean_pause_s: float
    hints: bool
    _bases: dict[tuple[str, int], int] = field(default_factory=dict)
    _sent: set[tuple[str, int]] = field(default_factory=set)
    spans_s: list[tuple[float, float]] = field(default_factory=list)
    """For each request, when it started to wait and when it was finished."""

    @property
    def busy(self) -> float:
        """Share of the time in which any request was waiting or served."""
        return busy_share(self.spans_s)

    async def run(
        self, all_walks: Sequence[WorkflowWalk], concurrency: int
    ) -> list[ServedWorkflow]:
        """Each place runs one workflow after the other, the next that has not begun."""
        for walk in all_walks:
            for step in walk.steps:
                if (walk.app.name, step.agent) not in self._bases:
                    n = await base_tokens(self.session, self.url, walk.app, step.agent)
                    self._bases[walk.app.name, step.agent] = n
        done: list[ServedWorkflow] = []
        left = iter(all_walks)

        async def place(n: int) -> None:
            await asyncio.sleep(n * self.mean_pause_s / concurrency)
            for walk in left:
                done.append(await self._workflow(walk))

        await asyncio.gather(*(place(n) for n in range(concurrency)))
        return sorted(done, key=lambda each: each.name)

    async def _workflow(self, walk: WorkflowWalk) -> ServedWorkflow:
        served = ServedWorkflow(walk.name, walk.is_measured)
        said = Transcript([(None, walk.task)])
        started = time.monotonic()
        for step in walk.steps:
            reply = await self._step(walk, step.agent, said.messages(walk.app, step.agent), served)
            said.lines += [(step.agent, reply), (None, step.result)]
            if step is not walk.steps[-1]:
                await asyncio.sleep(step.pause * self.mean_pause_s)
        served.completion_s = time.monotonic() - started
        if self.hints:
            url = f"{self.url}/towerd/v1/workflows/{walk.name}/end"
            async with self.session.post(url) as answer:
                await answer.read()
        return served

    async def _step(
        self, walk: WorkflowWalk, agent: int, messages: list[Message], served: ServedWorkflow
    ) -> str:
        headers = {
            "X-Towerd-Session": f"{walk.name}-{agent}",
            "X-Towerd-Workflow": walk.name,
            "X-Towerd-Agent": walk.agent_name(agent),
        }
        base = walk.app.name, agent
        started = time.monotonic()
        done = await chat(
            self.session, self.url, messages, self.load.reply_tokens, headers if self.hints else {}
        )
        self.spans_s.append((started, time.monotonic()))
        n_reused, n_evaluated = int(done.timings["cache_n"]), int(done.timings["prompt_n"])
        missed = n_reused < self._bases[base] if base in self._sent else None
        self._sent.add(base)
        served.steps.append(
            ServedStep(done.ttft_s, done.total_s, n_reused + n_evaluated, n_evaluated, missed)
        )
        return done.text


async def base_tokens(session: aiohttp.ClientSession, url: str, app: App, agent: int) -> int:
    """Tokens that all prompts of an agent begin with."""
    system = {"role": "system", "content": app.bases[agent]}
    ids = [
        await _tokens(session, url, [system, {"role": "user", "content": word}])
        for word in ("yes", "no")
    ]
    return next(n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)


async def _tokens(
    session: aiohttp.ClientSession, url: str, messages: Sequence[Message]
) -> list[int]:
    async with session.post(f"{url}/apply-template", json={"messages": messages}) as reply:
        text = (await reply.json())["prompt"]
    body = {"content": text, "add_special": True, "parse_special": True}
    async with session.post(f"{url}/tokenize", json=body) as reply:
        return list((await reply.json())["tokens"])


async def probe(
    session: aiohttp.ClientSession, url: str, path: Path, words: tuple[str, ...], load: WorkflowLoad
) -> ServedModel:
    """Measure a daemon that nothing else uses."""
    speeds, replied = list[float](), list[float]()
    n_words = load.app_words + load.base_words + load.task_words + 3 * load.result_words
    for n in range(_PROBES + 1):
        said = " ".join(words[n * n_words : (n + 1) * n_words])
        done = await chat(session, url, [{"role": "user", "content": said}], load.reply_tokens)
        timings: dict[str, Any] = done.timings
        speeds.append(1e3 * timings["prompt_n"] / timings["prompt_ms"])
        replied.append(1e3 * timings["predicted_n"] / timings["predicted_ms"])
    async with session.get(f"{url}/towerd/v1/segments") as reply:
        segments: list[dict[str, Any]] = (await reply.json())["segments"]
    one = [{"role": "user", "content": " ".join(words[:10])}]
    few, more = [len(await _tokens(session, url, one * n)) for n in (1, 11)]
    return ServedModel(
        path,
        words,
        segments[0]["bytes"] / segments[0]["tokens"],
        median(speeds[1:]),
        median(replied[1:]),
        (more - few) / 10 - 10,
    )
