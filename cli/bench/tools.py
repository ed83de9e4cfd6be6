"""`towerctl bench tools`: agents with thirty tools each, in turn, against llama-server.

Every agent has its own system prompt and its own tools, some 10,000 tokens, which come with each of
its requests, as agents send them. Three of them take turns; what a person waits for is the first
token of a turn. Both servers get the same model, context size and chat template; everything else is
their default. `parse_ms` is the time from the bytes of a chat of 17,000 messages to its tokens.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import numpy as np

from towerd.cli.bench.client import chat, new_session
from towerd.cli.bench.models import bench_model
from towerd.cli.bench.report import Report
from towerd.cli.bench.servers import ServerProcess, llama_server, towerd_server

Json = dict[str, Any]
WORDS = ("file", "path", "query", "branch", "commit", "user", "limit", "offset", "pattern", "value",
         "timeout", "mode", "format", "name", "target", "source", "page", "order", "filter", "key")  # fmt: skip
PARSED_MESSAGES = 17_000
PARSE_RUNS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What the agents send."""

    agents: int = 3
    tools: int = 30
    turns: int = 4
    reply_tokens: int = 16
    ctx_size: int = 32768


QUICK = Load(tools=6, turns=2)


def tool(rng: np.random.Generator, name: str) -> Json:
    """One function with eight described parameters: some 330 tokens of the bundled vocabularies."""
    properties: Json = {}
    for word in rng.permutation(WORDS)[:8].tolist():
        said = " ".join(rng.permutation(WORDS)[:9].tolist())
        properties[word] = {"type": "string", "description": f"The {word} to use: {said}."}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Works on {' and '.join(rng.permutation(WORDS)[:6].tolist())}.",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)[:2]},
        },
    }  # fmt: skip


async def run(model: Path | None, quick: bool) -> Report:
    """The same turns on towerd and on llama-server; then a long chat to its tokens, on towerd."""
    path = bench_model(model, "small" if quick else "1b")
    load = QUICK if quick else Load()
    template = files("towerd") / "data" / "templates" / "Qwen3.jinja"
    flags = ("-c", str(load.ctx_size), "--chat-template-file", str(template))
    report = Report("tools", path.name)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "store", *flags) as server:
            n_prompt, ours = await _drive(server, load)
            parse_s = await _parse_s(server)
    with llama_server(path, *flags) as server:
        _, theirs = await _drive(server, load)
    median = statistics.median
    report.figures |= {
        "prompt_tokens": n_prompt,
        "turns": len(ours),
        "towerd_ttft_p50_s": median(ours),
        "towerd_ttft_max_s": max(ours),
        "llama_server_ttft_p50_s": median(theirs),
        "llama_server_ttft_max_s": max(theirs),
        "ratio": median(theirs) / median(ours),
        "parse_ms": parse_s * 1e3,
    }
    report.target("ratio", least=10)
    return report


async def _drive(server: ServerProcess, load: Load) -> tuple[int, list[float]]:
    """Tokens of the first prompt, and the time to first token of each turn but the agents' first."""
    rng = np.random.default_rng(11)
    agents = [
        [tool(rng, f"agent{a}_tool{i}") for i in range(load.tools)] for a in range(load.agents)
    ]
    chats: list[list[Json]] = [
        [{"role": "system", "content": f"You are agent {a}."}] for a in range(load.agents)
    ]
    ttft_s: list[float] = []
    async with new_session() as session:
        body = {"messages": chats[0] + [{"role": "user", "content": "Begin."}], "tools": agents[0]}
        async with session.post(
            f"{server.url}/v1/chat/completions/input_tokens", json=body
        ) as reply:
            n_prompt = int((await reply.json())["input_tokens"])
        for turn in range(load.turns + 1):
            click.echo(f"{server.url}: turn {turn} of {load.turns}", err=True)
            for a, messages in enumerate(chats):
                messages.append({"role": "user", "content": f"Turn {turn}: go on with the work."})
                done = await chat(
                    session, server.url, messages, load.reply_tokens, tools=agents[a],
                    tool_choice="none",
                )  # fmt: skip
                messages.append({"role": "assistant", "content": done.text})
                if turn:
                    ttft_s.append(done.ttft_s)
    return n_prompt, ttft_s


async def _parse_s(server: ServerProcess) -> float:
    """Seconds from the bytes of a long chat to its number of tokens, the best of a few."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"Message {i} of a chat."}
        for i in range(PARSED_MESSAGES)
    ]
    data = json.dumps({"messages": messages}).encode()
    headers = {"Content-Type": "application/json"}
    times: list[float] = []
    async with new_session() as session:
        for _ in range(PARSE_RUNS):
            started = time.perf_counter()
            url = f"{server.url}/v1/chat/completions/input_tokens"
            async with session.post(url, data=data, headers=headers) as reply:
                await reply.read()
            times.append(time.perf_counter() - started)
    return min(times)
