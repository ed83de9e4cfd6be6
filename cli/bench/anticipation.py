"""`towerctl bench anticipation`: what the next turn of a reasoning chat has to evaluate.

The same chats twice, without and with anticipation, on the templates of Qwen3 and
DeepSeek-R1-Distill: each answer is a block of thinking and a short visible part, which the model
is made to write by a grammar (what it says does not matter, how the template renders it does). A
person thinks between turns until nothing is under way, and one question in five is put in other
words before it goes on, so that what was evaluated ahead after its first answer is in vain.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from towerd.cli.bench.client import new_session
from towerd.cli.bench.report import Report
from towerd.cli.bench.servers import towerd_server
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model

TEMPLATES = ("Qwen3", "DeepSeek-R1-Distill")
OPENS_THINKING = ("DeepSeek-R1-Distill",)
"""Templates whose generation prompt has begun to think already."""
_EDIT_EVERY = 5
_POLL_S = 0.02
_WORDS = "the cat saw a big red ball and ran to get it".split()
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Chats, and lengths in words of about two tokens of the bundled model."""

    chats: int = 6
    turns: int = 5
    thinking_words: int = 250
    answer_words: int = 100
    user_words: int = 5


QUICK = Load(chats=1, turns=4)


@dataclass(slots=True)
class Outcome:
    """Prompt tokens evaluated on turns that went on, and the daemon's own account."""

    evaluated: list[int] = field(default_factory=list)
    thinking: list[int] = field(default_factory=list)
    traffic: Json = field(default_factory=dict)


async def run(model: Path | None, quick: bool) -> Report:
    """Every template without and with anticipation."""
    path = model or bundled_model()
    load = QUICK if quick else Load()
    report = Report("anticipation", path.name)
    ratios: list[float] = []
    evaluated = wasted = 0
    for template in TEMPLATES:
        without = await _drive(path, template, load, "--no-anticipate")
        with_it = await _drive(path, template, load, "--anticipate")
        ratio = sum(without.evaluated) / max(1, sum(with_it.evaluated))
        ratios.append(ratio)
        evaluated += with_it.traffic["anticipated_tokens"]
        wasted += with_it.traffic["anticipated_tokens_wasted"]
        report.figures |= {
            f"{template}_ratio": ratio,
            f"{template}_prompt_tokens_without": float(np.mean(without.evaluated)),
            f"{template}_prompt_tokens_with": float(np.mean(with_it.evaluated)),
            f"{template}_answer_tokens": float(np.mean(with_it.thinking)),
        }
    report.figures |= {
        "anticipation_ratio": min(ratios),
        "anticipation_wasted": wasted / max(1, evaluated),
    }
    report.target("anticipation_ratio", least=5)
    return report


async def _drive(model: Path, template: str, load: Load, flag: str) -> Outcome:
    outcome = Outcome()
    rng = np.random.default_rng(11)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        source = Path(folder) / "template.jinja"
        source.write_text(
            (files("towerd") / "data" / "templates" / f"{template}.jinja").read_text()
        )
        flags = (
            "-c", "16384", "--live-tokens", "65536", "-t", "1", "--chat-template-file", str(source), flag,
        )  # fmt: skip
        with towerd_server(model, Path(folder) / "store", *flags) as server:
            async with new_session() as session:
                for chat in range(load.chats):
                    await _chat(session, server.url, f"chat-{chat}", template, load, rng, outcome)
                outcome.traffic = await _settled(session, server.url)
    return outcome


async def _chat(
    session: aiohttp.ClientSession, url: str, name: str, template: str, load: Load,
    rng: np.random.Generator, outcome: Outcome,
) -> None:  # fmt: skip
    messages: list[Json] = [{"role": "user", "content": _text(rng, load.user_words)}]
    grammar = _grammar(load, thinks_already=template in OPENS_THINKING)
    for turn in range(load.turns):
        reply = await _ask(session, url, name, messages, grammar)
        if turn:
            outcome.evaluated.append(reply["timings"]["prompt_n"])
        outcome.thinking.append(reply["timings"]["predicted_n"])
        await _settled(session, url)
        if (
            turn % _EDIT_EVERY == _EDIT_EVERY - 2
        ):  # asked in other words: what was ready is not used
            messages[-1] = {"role": "user", "content": _text(rng, load.user_words)}
            reply = await _ask(session, url, name, messages, grammar)
            await _settled(session, url)
        content = reply["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": "user", "content": _text(rng, load.user_words)})


async def _ask(
    session: aiohttp.ClientSession, url: str, name: str, messages: list[Json], grammar: str
) -> Json:
    body = {"messages": messages, "grammar": grammar, "temperature": 0, "seed": 1}
    headers = {"X-Towerd-Session": name}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        found: Json = await reply.json()
        if reply.status != 200:
            raise TowerdError(f"{url} answered {reply.status}: {found}")
    return found


async def _settled(session: aiohttp.ClientSession, url: str) -> Json:
    """The daemon's account once nothing is evaluated ahead any more."""
    while True:
        async with session.get(f"{url}/towerd/v1/stats") as reply:
            traffic: Json = (await reply.json())["traffic"]
        if not traffic.get("anticipations_running"):
            return traffic
        await asyncio.sleep(_POLL_S)


def _grammar(load: Load, *, thinks_already: bool) -> str:
    """Words of thinking, then words to be seen, in numbers that are the load's."""
    words = " | ".join(f'"{word} "' for word in dict.fromkeys(_WORDS))
    begin = "" if thinks_already else '"<think>\\n" '
    return (
        f'root ::= {begin}word{{{load.thinking_words}}} "\\n</think>\\n\\n" '
        f"word{{{load.answer_words}}}\nword ::= {words}"
    )


def _text(rng: np.random.Generator, n_words: int) -> str:
    return " ".join(_words(rng, n_words))


def _words(rng: np.random.Generator, n_words: int) -> Iterator[str]:
    for _ in range(n_words):
        yield str(rng.choice(_WORDS))
