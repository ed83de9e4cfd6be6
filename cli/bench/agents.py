"""`towerctl bench agents`: agents that come and go, with room for a fiftieth of what they say.

A few users, each with one agent after the other in a closed loop. An agent begins with the system
prompt of its kind, then works in steps: most follow at once, as after a tool's result; after some
its user reads and thinks. RAM and disk hold a small share of all distinct tokens, so what comes
back was kept or is evaluated again. The same requests run under the default policy and under LRU;
what is compared is the time to first token.

Prompts are short, so that ten minutes of a CPU hold hundreds of them: what matters is how much of
what is at work fits. With ten agents a user, a fiftieth of all tokens is about a third of what the
users are at, as it is for 72 coding agents.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import numpy as np

from towerd.cli.bench.client import complete, new_session
from towerd.cli.bench.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.report import Report
from towerd.cli.bench.servers import towerd_server
from towerd.config import defaults

BASELINE = "lru"
_ENDS: dict[str, Any] = {"ignore_eos": False, "grammar": 'root ::= "."'}
"""Makes an answer end by itself, as one that hands on to a person does; the others are cut off,
which stands for a call of a tool. The daemon only sees why an answer ended."""


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens, times in seconds. `share`: of the distinct tokens, in RAM and on disk."""

    users: int = 8
    agents_per_user: int = 10
    steps: int = 6
    kinds: int = 3
    system_tokens: int = 16
    step_tokens: int = 12
    reply_tokens: int = 2
    share: float = 0.02
    pause_s: float = 0.1
    think_s: float = 8.0
    think_every: int = 3
    ctx_size: int = 1024


QUICK = Load(users=4, agents_per_user=3, steps=4, share=0.1, think_s=0.5)


@dataclass(slots=True)
class Outcome:
    """What the clients saw."""

    ttft_s: list[float] = field(default_factory=list)
    n_prompt: int = 0
    n_evaluated: int = 0


async def run(
    model: Path | None, quick: bool, policy: str | None = None, share: float | None = None
) -> Report:
    """Both policies on the same requests."""
    path = bench_model(model, "small" if quick else "1b")
    load = QUICK if quick else Load()
    name = policy or str(defaults()["policy"])
    share = share or load.share
    found = {
        each: await _drive(path, load, each, share) for each in dict.fromkeys((name, BASELINE))
    }
    ours, theirs = found[name], found[BASELINE]
    report = Report("agents", path.name)
    report.figures |= {
        "policy": name,
        "requests": len(ours.ttft_s),
        "distinct_tokens": _distinct_tokens(load),
        "share": share,
    }
    for key, outcome in (("policy", ours), ("lru", theirs)):
        report.figures |= {
            f"{key}_ttft_p50_s": median(outcome.ttft_s),
            f"{key}_ttft_p90_s": float(np.quantile(outcome.ttft_s, 0.9)),
            f"{key}_ttft_mean_s": mean(outcome.ttft_s),
            f"{key}_hit_rate": 1 - outcome.n_evaluated / outcome.n_prompt,
        }
    figures = report.figures
    report.figures |= {
        "ttft_ratio": figures["lru_ttft_p50_s"] / figures["policy_ttft_p50_s"],
        "ttft_ratio_p90": figures["lru_ttft_p90_s"] / figures["policy_ttft_p90_s"],
        "ttft_ratio_mean": figures["lru_ttft_mean_s"] / figures["policy_ttft_mean_s"],
    }
    report.target("ttft_ratio", least=1.3)
    return report


def _distinct_tokens(load: Load) -> int:
    own = load.steps * (load.step_tokens + load.reply_tokens)
    return load.kinds * load.system_tokens + load.users * load.agents_per_user * own


async def _drive(model: Path, load: Load, policy: str, share: float) -> Outcome:
    outcome = Outcome()
    n_vocab = vocab_size(model)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        budget = str(await _budget(model, load, share, Path(folder)))
        # One request at a time and nothing live beside it: what is kept is the policy's choice.
        flags = (
            "-c", str(load.ctx_size), "--live-tokens", str(load.ctx_size), "--live-sequences", "1",
            "-np", "1", "--policy", policy, "--hot-bytes", budget, "--warm-bytes", budget,
            "--fidelity", "exact",
        )  # fmt: skip
        with towerd_server(model, Path(folder) / "store", *flags) as server:
            async with new_session() as session:
                users = [
                    _user(session, server.url, user, load, n_vocab, outcome)
                    for user in range(load.users)
                ]
                await asyncio.gather(*users)
    return outcome


async def _budget(model: Path, load: Load, share: float, folder: Path) -> int:
    """Bytes that `share` of the distinct tokens take."""
    with towerd_server(model, folder / "probe", "-c", "256") as server:
        async with new_session() as session:
            ids = random_prompt(np.random.default_rng(0), 64, vocab_size(model)).tolist()
            await complete(session, server.url, ids, 1)
            async with session.get(f"{server.url}/towerd/v1/segments") as reply:
                segments: list[dict[str, Any]] = (await reply.json())["segments"]
    token_bytes = segments[0]["bytes"] / segments[0]["tokens"]
    return int(share * _distinct_tokens(load) * token_bytes)


async def _user(
    session: aiohttp.ClientSession, url: str, user: int, load: Load, n_vocab: int, outcome: Outcome
) -> None:
    rng = np.random.default_rng([5, user])
    kinds = np.random.default_rng(9)
    systems = [
        random_prompt(kinds, load.system_tokens, n_vocab).tolist() for _ in range(load.kinds)
    ]
    await asyncio.sleep(float(rng.uniform(0, load.think_s)))
    for agent in range(load.agents_per_user):
        kind = int(rng.integers(load.kinds))
        history = list(systems[kind])
        headers = {"X-Towerd-Session": f"u{user}-{agent}", "X-Towerd-Agent": f"kind-{kind}"}
        for step in range(1, load.steps + 1):
            history += random_prompt(rng, load.step_tokens, n_vocab).tolist()
            thinks = step % load.think_every == 0
            ending = _ENDS if thinks else {}
            done = await complete(session, url, history, load.reply_tokens, headers, **ending)
            outcome.ttft_s.append(done.ttft_s)
            outcome.n_prompt += len(history)
            outcome.n_evaluated += int(done.timings["prompt_n"])
            history += done.tokens
            mean_s = load.think_s if thinks else load.pause_s
            await asyncio.sleep(float(rng.exponential(mean_s)))
