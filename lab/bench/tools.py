"""`towerctl bench tools`: three sessions of one agent program take turns, against llama-server.

Every request contains the same thirty tools, 10,000 tokens of definitions, then the session's own
project notes and its history, as agent programs send them. The figure is the time to the first
token of a turn. Both servers get the same model and chat template; everything else is their
default. `tokenise_17000_ms` is the time from the bytes of a chat of 17,000 messages to the number
of its tokens, `tokenise_17000_turn_ms` that of its next turns.
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

import aiohttp
import click
import numpy as np

from towerd.cli.bench.harness.client import chat, new_session
from towerd.cli.bench.harness.models import bench_model
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, llama_server, towerd_server

Json = dict[str, Any]
WORDS = (
    "file path query branch commit user limit offset pattern value "
    "timeout mode format name target source page order filter key"
).split()
LONG_CHAT_MESSAGES = 17_000
LONG_CHAT_TURNS = 5


@dataclass(frozen=True, slots=True)
class ToolsLoad:
    """What the agents send; sizes are approximate, in tokens of the model's vocabulary."""

    agents: int = 3
    tools: int = 30
    tool_tokens: int = 10_000
    project_tokens: int = 1000
    result_tokens: int = 40
    reply_tokens: int = 16
    turns: int = 4


QUICK = ToolsLoad(tool_tokens=3000, tools=10, project_tokens=500, turns=3)


def tool(name: str, n_parameters: int) -> Json:
    """One function with `n_parameters` described parameters."""
    rng = np.random.default_rng(len(name))
    properties: Json = {}
    for i in range(n_parameters):
        said = _words(rng, 9)
        properties[f"{WORDS[i % len(WORDS)]}_{i}"] = {"type": "string", "description": said}
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    function = {
        "name": name,
        "description": f"Works on {_words(rng, 6)}.",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _words(rng: np.random.Generator, n: int) -> str:
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), n))


async def run(model: Path | None, quick: bool) -> Report:
    """Run the same turns on towerd and llama-server; then time the turns of a long chat."""
    path = bench_model(model, "small" if quick else "1b")
    load = QUICK if quick else ToolsLoad()
    template = files("towerd") / "data" / "templates" / "Qwen3.jinja"
    flags = ("--chat-template-file", str(template))
    report = Report("tools", path.name)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "store", *flags) as server:
            n_prompt, ours, evaluated = await _drive(server, load)
            first_s, turn_s = await _tokenise_s(server)
    with llama_server(path, *flags) as server:
        _, theirs, evaluated_again = await _drive(server, load)
    median = statistics.median
    report.figures |= {
        "prompt_tokens": n_prompt,
        "turns": len(ours),
        "towerd_ttft_p50_s": median(ours),
        "towerd_ttft_max_s": max(ours),
        "llama_server_ttft_p50_s": median(theirs),
        "llama_server_ttft_max_s": max(theirs),
        "towerd_evaluated_p50": median(evaluated),
        "llama_server_evaluated_p50": median(evaluated_again),
        "ratio": median(theirs) / median(ours),
        "tokenise_17000_ms": first_s * 1e3,
        "tokenise_17000_turn_ms": turn_s * 1e3,
    }
    report.target("ratio", least=10)
    report.target("tokenise_17000_turn_ms", most=100)
    return report


async def _drive(server: ServerProcess, load: ToolsLoad) -> tuple[int, list[float], list[int]]:
    """The tokens of the first prompt; then, for each turn except the agents' first, the time to its
    first token, and how many tokens of its prompt were evaluated."""
    ttft_s: list[float] = []
    evaluated: list[int] = []
    async with new_session() as session:
        tools = await _tools(session, server.url, load)
        rng = np.random.default_rng(11)
        per_word = await _count(session, server.url, _words(rng, 200)) / 200
        chats: list[list[Json]] = [
            [
                {"role": "system", "content": "You are an agent that works with tools."},
                {"role": "user", "content": _words(rng, int(load.project_tokens / per_word))},
            ]
            for _ in range(load.agents)
        ]
        n_prompt = await _count_chat(session, server.url, {"messages": chats[0], "tools": tools})
        for turn in range(load.turns + 1):
            click.echo(f"{server.url}: turn {turn} of {load.turns}", err=True)
            for messages in chats:
                done = await chat(
                    session,
                    server.url,
                    messages,
                    load.reply_tokens,
                    tools=tools,
                    tool_choice="none",
                )
                result = _words(rng, int(load.result_tokens / per_word))
                messages.append({"role": "assistant", "content": done.text})
                messages.append({"role": "user", "content": result})
                if turn:
                    ttft_s.append(done.ttft_s)
                    evaluated.append(done.timings["prompt_n"])
    return n_prompt, ttft_s, evaluated


async def _tools(session: aiohttp.ClientSession, url: str, load: ToolsLoad) -> list[Json]:
    """`load.tools` tools, with enough parameters each for `load.tool_tokens` in total."""
    hello = [{"role": "user", "content": "Hello."}]

    def made(n_parameters: int) -> list[Json]:
        return [tool(f"tool_{i}", n_parameters) for i in range(load.tools)]

    few, more = [
        await _count_chat(session, url, {"messages": hello, "tools": made(n)}) for n in (1, 5)
    ]
    return made(max(1, 1 + round((load.tool_tokens - few) * 4 / (more - few))))


async def _count_chat(session: aiohttp.ClientSession, url: str, body: Json) -> int:
    async with session.post(f"{url}/v1/chat/completions/input_tokens", json=body) as reply:
        return int((await reply.json())["input_tokens"])


async def _count(session: aiohttp.ClientSession, url: str, text: str) -> int:
    async with session.post(f"{url}/tokenize", json={"content": text}) as reply:
        return len((await reply.json())["tokens"])


async def _tokenise_s(server: ServerProcess) -> tuple[float, float]:
    """Seconds from the bytes of a long chat to its number of tokens: the first time, and the median
    of its next turns."""
    times: list[float] = []
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions/input_tokens"
    async with new_session() as session:
        for turn in range(1 + LONG_CHAT_TURNS):
            data = _long_chat(LONG_CHAT_MESSAGES + 2 * turn)
            started = time.perf_counter()
            async with session.post(url, data=data, headers=headers) as reply:
                await reply.read()
            times.append(time.perf_counter() - started)
    return times[0], statistics.median(times[1:])


def _long_chat(n_messages: int) -> bytes:
    """A chat of a system message, and `n_messages - 1` of which the last one is the user's."""
    messages = [{"role": "system", "content": "You are an agent that works with tools."}]
    for i in range(n_messages - 1):
        role = "user" if (n_messages - i) % 2 == 0 else "assistant"
        messages.append({"role": role, "content": f"Message {i} of a chat."})
    return json.dumps({"messages": messages}).encode()
