"""`towerctl bench volatile`: agents' prompts that change in the middle, and what is served for them.

Each session is built by a few requests, then its prompt changes. The same ids go to four servers, one
after the other: towerd as it is by default, towerd with `--fidelity exact`, which reuses prefixes
alone, a second one of these, and llama-server with `--cache-reuse`. The two exact ones evaluate the
reply of the first again, token by token as it was served. The reference is the second, which evaluates
the changed prompt turn by turn; what the first exact one differs by from it is the noise of batches of
other shapes. Where towerd moves nothing its batches are those of that one, so that the excess is 0.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import click
import numpy as np

from lab.bench.volatile.changes import BAD, CHANGES, GOOD
from lab.bench.volatile.divergence import ReplyDrift, mean_excess
from lab.bench.volatile.prompts import AgentPrompt, AgentShape, requests_of, session
from towerd.cli.bench.harness.client import Completion, complete, daemon_stats, new_session
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import llama_server, towerd_server
from towerd.cli.output import show_table
from towerd.errors import TowerdError
from towerd.models.bundled import default_model
from towerd.system.machine import usable_cores
from towerd.tokens import common_prefix

CACHE_REUSE = 64
"""The shortest run that llama-server moves; towerd's is as long."""
TOP_TOKENS = 200
"""How many tokens of each distribution are compared one by one."""
EXACT = ("--fidelity", "exact")
_FORCING = 1e3
"""Added to the logit of a token that has to be chosen; probabilities are told without it."""
_LOOK_S = 0.25
"""Between two looks at what a daemon evaluates."""


@dataclass(frozen=True, slots=True)
class VolatileLoad:
    """The sessions: how large they are, and which changes each meets, one a request."""

    shape: AgentShape
    sessions: Sequence[Sequence[str]]
    """Names of `GOOD`, and of `BAD` at the end. A reminder moves at the first of them."""
    reply_tokens: int = 48
    ctx_size: int = 4096


LOAD = VolatileLoad(
    AgentShape(rules=12, tools=7, memory=10, tasks=2, code_lines=18),
    (
        ("date", "memory", "session_id", "shared_words"),
        ("environment", "rule", "oldest_dropped", "swapped_tools"),
        ("reminder", "date", "compaction", "unrelated"),
        ("session_id", "environment", "tool_added", "shared_words"),
        ("persona", "date", "oldest_dropped", "unrelated"),
        ("reminder", "environment", "memory", "swapped_tools"),
        ("tool_added", "compaction", "rule", "shared_words"),
    ),
)
QUICK = VolatileLoad(
    AgentShape(rules=4, tools=3, memory=7, tasks=1, code_lines=7),
    (
        ("date", "oldest_dropped", "shared_words"),
        ("reminder", "environment", "swapped_tools"),
        ("session_id", "tool_added", "unrelated"),
    ),
    reply_tokens=32,
)


@dataclass(frozen=True, slots=True)
class Served:
    """A request with a changed prompt, and how it was served."""

    kind: str
    prompt_tokens: int
    near: Completion
    exact: Completion
    rival: Completion
    drift: ReplyDrift

    @property
    def reuse(self) -> dict[str, int]:
        """Where towerd has the prompt's tokens from: of those that it moved, `moved`, `checked`, `refused`."""
        found: dict[str, int] = self.near.final["towerd"]["reuse"]
        return found

    @property
    def told_excess(self) -> float | None:
        """What towerd itself says that the reply has over the noise, in nats; None: nothing."""
        drift = self.near.final["towerd"].get("drift", {})
        return drift["kl"] - drift["floor_kl"] if drift.get("kl") is not None else None

    @property
    def was_cut(self) -> bool:
        """Whether rows were found that the check refused."""
        return self.reuse.get("refused", 0) > 0


@dataclass(slots=True)
class VolatileReport(Report):
    """A report with a line for each kind of change."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> None:
        keys = list(self.lines[0])
        columns = [key if key == "change" else f">{key}" for key in keys]
        show_table(columns, [[_cell(line[key]) for key in keys] for line in self.lines])
        Report.show(self)

    def as_json(self) -> dict[str, Any]:
        return {**Report.as_json(self), "changes": self.lines}


async def run(model: Path | None, quick: bool) -> Report:
    """Serve all sessions; raises TowerdError."""
    path = model or default_model()
    load = QUICK if quick else LOAD
    report = VolatileReport("volatile", path.name)
    flags = ("-c", str(load.ctx_size), "-t", str(usable_cores()), "-np", "8")
    # Which formats idle rows are stored in is not found out meanwhile: it would take minutes.
    default = ("--level-formats", "0=native")
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder, ExitStack() as stack:
        near, exact, again = (
            stack.enter_context(
                towerd_server(path, Path(folder) / name / "store", *flags, *own)
            ).url
            for name, own in (("near", default), ("exact", EXACT), ("again", EXACT))
        )
        reusing = ("-kvu", "--cache-reuse", str(CACHE_REUSE))
        rival = stack.enter_context(llama_server(path, *flags, *reusing)).url
        async with new_session() as client:
            await calibrated(client, near)
            servers = Servers(client, load.reply_tokens, near, exact, again, rival)
            requests = [each async for each in servers.served(load)]
    report.figures |= figures(requests)
    known = {each.kind for each in requests}
    report.lines = [line(kind, requests) for kind in CHANGES if kind in known]
    report.target("evaluated_ratio", least=4)
    report.target("ttft_ratio", least=3)
    report.target("vs_cache_reuse_ttft", least=3)
    report.target("kl_excess", most=0.002)
    report.target("refused_bad", least=0.95)
    report.target("refused_good", most=0.1)
    return report


async def calibrated(client: aiohttp.ClientSession, url: str) -> None:
    """Wait until a daemon knows what moved rows cost. Raises TowerdError if it cannot."""
    click.echo("measuring what moved rows cost", err=True)
    path = f"{url}/towerd/v1/calibration"
    async with client.post(path, json={"formats": False}) as reply:
        if reply.status != 200:
            raise TowerdError(f"{path} answered {reply.status}: {await reply.text()}")
    while True:
        async with client.get(path) as reply:
            found = (await reply.json())["calibration"]
        if found["moved"] is not None:
            return
        if found["state"] not in ("running", "waiting"):
            raise TowerdError(f"What moved rows cost cannot be measured: {found['why']}")
        await asyncio.sleep(_LOOK_S)


@dataclass(frozen=True, slots=True)
class Servers:
    """The addresses of the four servers, which get the same ids, and how they are asked."""

    client: aiohttp.ClientSession
    reply_tokens: int
    near: str
    exact: str
    again: str
    rival: str

    async def served(self, load: VolatileLoad) -> AsyncIterator[Served]:
        """The requests with changed prompts, in the order of their sessions."""
        for seed, kinds in enumerate(load.sessions):
            click.echo(f"session {seed + 1} of {len(load.sessions)}", err=True)
            whole = session(seed, load.shape, reminder="reminder" in kinds)
            await self._build(replace(whole, turns=whole.turns[: load.shape.turns_built]))
            for kind, prompt in changing(whole, load.shape.turns_built, kinds, seed):
                yield await self._serve(kind, prompt)

    async def _build(self, prompt: AgentPrompt) -> None:
        """Send the requests that led to `prompt` to all but `again`."""
        for ids in await self._requests(prompt):
            for url in (self.near, self.exact, self.rival):
                await self._ask(url, ids, 1)

    async def _serve(self, kind: str, prompt: AgentPrompt) -> Served:
        *earlier, ids = await self._requests(prompt)
        for url in (self.near, self.exact):
            await self._at_rest(url)
        near = await self._ask(self.near, ids, self.reply_tokens)
        await self._at_rest(self.near)
        said = near.tokens[:1]
        exact = await self._ask(self.exact, ids, 1, said)
        rival = await self._ask(self.rival, ids, 1)
        for before in earlier:
            # As far as the agent had sent this beginning at that time, so that batches end there.
            await self._ask(self.again, ids[: _n_common(before, ids)], 1)
        again = await self._ask(self.again, ids, 1, said)
        places = range(next(i for i in count() if i not in near.top))
        exact_top, again_top = ([done.top[i] for i in places[:1]] for done in (exact, again))
        for i in places[1:]:
            for url, found in ((self.exact, exact_top), (self.again, again_top)):
                done = await self._ask(url, ids + near.tokens[:i], 1, near.tokens[i : i + 1])
                found.append(done.top[0])
        drift = ReplyDrift.of(again_top, [near.top[i] for i in places], exact_top)
        return Served(kind, len(ids), near, exact, rival, drift)

    async def _ask(
        self, url: str, ids: list[int], n_predict: int, forced: Sequence[int] = ()
    ) -> Completion:
        """Greedy, until the reply ends. forced: the token to choose, whatever its probability: that of one
        that is no whole character is not told."""
        fields: dict[str, Any] = {"n_probs": TOP_TOKENS, "ignore_eos": False}
        if forced:
            fields["logit_bias"] = [[token, _FORCING] for token in forced]
        if url == self.rival:
            fields["id_slot"] = 0  # where the chat is, even if its first line changed
        return await complete(self.client, url, ids, n_predict, **fields)

    async def _requests(self, prompt: AgentPrompt) -> list[list[int]]:
        """The ids of all requests that led to `prompt`, its own last."""
        return [await self._ids(each) for each in requests_of(prompt)]

    async def _ids(self, prompt: AgentPrompt) -> list[int]:
        """The prompt in the model's chat template, as token ids."""
        said = {"messages": prompt.messages()}
        text = (await self._post("/apply-template", said))["prompt"]
        asked = {"content": text, "add_special": True, "parse_special": True}
        ids: list[int] = (await self._post("/tokenize", asked))["tokens"]
        return ids

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.client.post(self.exact + path, json=body) as reply:
            found: dict[str, Any] = await reply.json()
            if reply.status != 200:
                raise TowerdError(f"{self.exact}{path} answered {reply.status}: {found}")
        return found

    async def _at_rest(self, url: str) -> None:
        """Wait until a daemon evaluates nothing in idle time, neither for the store nor ahead."""
        n_decoded = -1
        while True:
            stats = await daemon_stats(self.client, url)
            traffic = stats["traffic"]
            running = stats["engine"]["running"] or traffic["anticipations_running"]
            running = running or traffic["moved_answers_waiting"]
            if not running and stats["engine"]["tokens_decoded"] == n_decoded:
                return
            n_decoded = stats["engine"]["tokens_decoded"]
            await asyncio.sleep(_LOOK_S)


def changing(
    whole: AgentPrompt, n_turns: int, kinds: Sequence[str], seed: int
) -> Iterator[tuple[str, AgentPrompt]]:
    """The prompts of a session after its first `n_turns` turns: between two the agent goes on by two turns,
    and one of the changes happens, of which each stays."""
    rng = np.random.default_rng([seed, 1])
    prompt = replace(whole, turns=whole.turns[:n_turns])
    for kind in kinds:
        going_on = whole.turns[n_turns : n_turns + 2]
        n_turns += 2
        changed = CHANGES[kind](prompt, rng)
        prompt = replace(changed, turns=(*changed.turns, *going_on))
        yield kind, prompt


def figures(requests: Sequence[Served]) -> dict[str, Any]:
    """What all requests show together. Ratios are of the good changes, divergences of all."""
    good = [each for each in requests if each.kind in GOOD]
    bad = [each for each in requests if each.kind in BAD]
    near, exact, rival = (_ttft_s(good, name) for name in ("near", "exact", "rival"))
    drifts = [each.drift for each in requests]
    return {
        "requests": len(requests),
        "prompt_tokens_p50": median(each.prompt_tokens for each in requests),
        "evaluated_ratio": _n_evaluated(good, "exact") / _n_evaluated(good, "near"),
        "evaluated_ratio_all": _n_evaluated(requests, "exact") / _n_evaluated(requests, "near"),
        "vs_cache_reuse_evaluated": _n_evaluated(good, "rival") / _n_evaluated(good, "near"),
        "ttft_ratio": mean(exact) / mean(near),
        "ttft_ratio_p50": median(a / b for a, b in zip(exact, near, strict=True)),
        "vs_cache_reuse_ttft": mean(rival) / mean(near),
        "vs_cache_reuse_ttft_p50": median(a / b for a, b in zip(rival, near, strict=True)),
        "near_ttft_p50_s": median(near),
        "exact_ttft_p50_s": median(exact),
        "cache_reuse_ttft_p50_s": median(rival),
        "kl_noise": float(np.mean(np.concatenate([each.noise for each in drifts]))),
        "kl_excess": mean_excess(drifts),
        "kl_excess_p99_request": float(np.quantile([mean_excess([each]) for each in drifts], 0.99)),
        "reply_tokens_compared": sum(len(each.served) for each in drifts),
        "refused_bad": mean(each.was_cut for each in bad),
        "refused_good": mean(each.was_cut for each in good),
    }


def line(kind: str, requests: Sequence[Served]) -> dict[str, Any]:
    """The means of the requests with one kind of change. Raises StatisticsError if there are none."""
    found = [each for each in requests if each.kind == kind]
    out: dict[str, Any] = {"change": kind, "requests": len(found)}
    out["prompt"] = round(mean(each.prompt_tokens for each in found))
    for name in ("near", "exact", "rival"):
        out[f"{name}_evaluated"] = round(_n_evaluated(found, name) / len(found))
    for name in ("near", "exact", "rival"):
        out[f"{name}_ttft_s"] = mean(_ttft_s(found, name))
    for name in ("moved", "checked", "refused"):
        out[name] = round(mean(each.reuse.get(name, 0) for each in found))
    told = [each.told_excess for each in found if each.told_excess is not None]
    out["told_excess"] = mean(told) if told else None
    return out | {"excess": mean_excess([each.drift for each in found])}


def _n_common(a: list[int], b: list[int]) -> int:
    return common_prefix(np.asarray(a, np.int32), np.asarray(b, np.int32))


def _ttft_s(requests: Sequence[Served], name: str) -> list[float]:
    return [getattr(each, name).ttft_s for each in requests]


def _n_evaluated(requests: Sequence[Served], name: str) -> int:
    return sum(getattr(each, name).timings["prompt_n"] for each in requests)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) >= 0.01 or not value else f"{value:.4f}"
    return "" if value is None else str(value)
