"""`towerctl lab bench anticipation`: what the next turn of a chat has to evaluate.

The same chats twice, without and with anticipation, on the model's own template and on those of
Qwen3 and DeepSeek-R1-Distill. Under these two each answer is a block of thinking and a visible
part. A grammar makes the model write that many words: its words do not matter, but how the template
renders them does. The user waits between turns until no evaluation is in progress, and one question
in five is asked again in other words before the chat continues, so that the tokens evaluated ahead
after its first answer are wasted.
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

from towerd.cli.bench.harness.client import daemon_stats, new_session
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import towerd_server
from towerd.codec.vocabulary import GgufVocabulary
from towerd.errors import TowerdError
from towerd.models.bundled import default_model

OWN = "own"
"""The model's own template, which renders answers without thinking."""
TEMPLATES = ("Qwen3", "DeepSeek-R1-Distill")
OPENS_THINKING = ("DeepSeek-R1-Distill",)
"""Templates whose generation prompt already opens a thinking block."""
_EDIT_EVERY = 5
_POLL_S = 0.02
WORDS = "the cat saw a big red ball and ran to get it".split()
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnticipationLoad:
    """The size of the load; lengths in tokens."""

    chats: int = 2
    turns: int = 5
    thinking_tokens: int = 150
    answer_tokens: int = 200
    user_tokens: int = 10


QUICK = AnticipationLoad(chats=1, turns=4)


@dataclass(frozen=True, slots=True)
class Words:
    """The load's lengths in words, by the model's tokenizer."""

    thinking: int
    answer: int
    user: int

    @classmethod
    def of(cls, load: AnticipationLoad, model: Path) -> Words:
        with GgufVocabulary(model) as vocabulary:
            n_tokens = len(vocabulary.tokenize(" ".join(WORDS).encode()))
        each = (load.thinking_tokens, load.answer_tokens, load.user_tokens)
        return cls(*(max(1, round(n * len(WORDS) / n_tokens)) for n in each))


@dataclass(slots=True)
class AnticipationOutcome:
    """Prompt tokens evaluated on turns that continued their chat, and the daemon's own counters."""

    evaluated: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    traffic: Json = field(default_factory=dict)


async def run(model: Path | None, quick: bool) -> Report:
    """Measure every template without and with anticipation."""
    path = model or default_model()
    load = QUICK if quick else AnticipationLoad()
    words = Words.of(load, path)
    report = Report("anticipation", path.name)
    ratios: list[float] = []
    evaluated = wasted = 0
    for template in (OWN, *TEMPLATES):
        without = await _drive(path, template, load, words, "--no-anticipate")
        with_it = await _drive(path, template, load, words, "--anticipate")
        ratio = sum(without.evaluated) / max(1, sum(with_it.evaluated))
        if template in TEMPLATES:
            ratios.append(ratio)
        evaluated += with_it.traffic["anticipated_tokens"]
        wasted += with_it.traffic["anticipated_tokens_wasted"]
        report.figures |= {
            f"{template}_ratio": ratio,
            f"{template}_prompt_tokens_without": float(np.mean(without.evaluated)),
            f"{template}_prompt_tokens_with": float(np.mean(with_it.evaluated)),
            f"{template}_answer_tokens": float(np.mean(with_it.answers)),
        }
    report.figures |= {
        "anticipation_ratio": min(ratios),
        "anticipation_wasted": wasted / max(1, evaluated),
    }
    report.target("anticipation_ratio", least=5)
    return report


async def _drive(
    model: Path, template: str, load: AnticipationLoad, words: Words, flag: str
) -> AnticipationOutcome:
    outcome = AnticipationOutcome()
    rng = np.random.default_rng(11)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        flags = ["-c", "8192", "--live-tokens", "32768", flag]
        if template != OWN:
            source = Path(folder) / "template.jinja"
            source.write_text(
                (files("towerd") / "data" / "templates" / f"{template}.jinja").read_text()
            )
            flags += ["--chat-template-file", str(source)]
        with towerd_server(model, Path(folder) / "store", *flags) as server:
            async with new_session() as session:
                for chat in range(load.chats):
                    await _chat(
                        session,
                        server.url,
                        f"chat-{chat}",
                        template,
                        load.turns,
                        words,
                        rng,
                        outcome,
                    )
                outcome.traffic = await _settled(session, server.url)
    return outcome


async def _chat(
    session: aiohttp.ClientSession,
    url: str,
    name: str,
    template: str,
    turns: int,
    words: Words,
    rng: np.random.Generator,
    outcome: AnticipationOutcome,
) -> None:
    messages: list[Json] = [{"role": "user", "content": _text(rng, words.user)}]
    grammar = _grammar(words, template)
    for turn in range(turns):
        reply = await _ask(session, url, name, messages, grammar)
        if turn:
            outcome.evaluated.append(reply["timings"]["prompt_n"])
        outcome.answers.append(reply["timings"]["predicted_n"])
        await _settled(session, url)
        if turn % _EDIT_EVERY == _EDIT_EVERY - 2:
            # Asked in other words: what was evaluated ahead is not used.
            messages[-1] = {"role": "user", "content": _text(rng, words.user)}
            reply = await _ask(session, url, name, messages, grammar)
            await _settled(session, url)
        content = reply["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": "user", "content": _text(rng, words.user)})


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
    """The daemon's counters, once nothing is being evaluated ahead."""
    while True:
        traffic: Json = (await daemon_stats(session, url))["traffic"]
        if not traffic.get("anticipations_running"):
            return traffic
        await asyncio.sleep(_POLL_S)


def _grammar(words: Words, template: str) -> str:
    """A grammar for words of thinking, if the template has it, and then visible words."""
    some = " | ".join(f'"{word} "' for word in dict.fromkeys(WORDS))
    thinking = f'word{{{words.thinking}}} "\\n</think>\\n\\n" '
    if template == OWN:
        thinking = ""
    elif template not in OPENS_THINKING:
        thinking = f'"<think>\\n" {thinking}'
    return f"root ::= {thinking}word{{{words.answer}}}\nword ::= {some}"


def _text(rng: np.random.Generator, n_words: int) -> str:
    return " ".join(_words(rng, n_words))


def _words(rng: np.random.Generator, n_words: int) -> Iterator[str]:
    for _ in range(n_words):
        yield str(rng.choice(WORDS))
