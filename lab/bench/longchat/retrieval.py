"""Retrieval of facts from a long prompt, under different live budgets.

A text states several facts at different depths. It is evaluated once under each budget, and each
question at its end is a branch of it, like an edited message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from lab.texts.tasks import Fact
from lab.texts.tokenizer import TextTokenizer
from towerd.engine.base import GenerateRequest, LiveBudget, Piece, encode
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.service import Service
from towerd.tokens import Ids


@dataclass(frozen=True, slots=True)
class Asked:
    """A fact that `question` asks for. The reply is started with `begin`, which a small model
    would not always generate, and has to continue with `answer`."""

    question: str
    begin: str
    answer: str


FACTS = (
    Asked("What is the secret word?", "The secret word is", "mango"),
    Asked("In which year was Anna born?", "Anna was born in the year", "1987"),
    Asked("What is Anna's dog called?", "Anna's dog is called", "Rufus"),
    Asked("When does the ferry leave?", "The ferry leaves on", "Thursday"),
    Asked("What is the pass key?", "The pass key is", "48213"),
    Asked("What is Peter's favourite colour?", "Peter's favourite colour is", "purple"),
    Asked("What is the hotel called?", "The hotel is called the", "Meridian"),
    Asked("What does Maria work as?", "Maria works as a", "dentist"),
)
"""All of different kinds: a small model confuses several pass keys, even if it sees them."""
_ANSWER_TOKENS = 12
"""Longer than any answer."""


@dataclass(frozen=True, slots=True)
class RetrievalTask:
    """A text of about `n` tokens, and the facts in it to ask for, by depth."""

    name: str
    n: int
    text: str
    asked: tuple[Asked, ...]


def facts(tokenizer: TextTokenizer, text: str, n: int, n_asked: int = len(FACTS)) -> RetrievalTask:
    """FACTS, of which `n_asked` are asked for, spread over a text of n tokens, stated and asked for in the same words, as pass keys
    are in "Landmark Attention" (Mohtashami and Jaggi, 2023). Raises ConfigError if the text is too
    short."""
    told = [f"\nRemember this: {fact.begin} {fact.answer}.\n" for fact in FACTS]
    (filler,) = tokenizer.windows(text, 1, n - sum(len(tokenizer.ids(each)) for each in told))
    cuts = np.linspace(len(tokenizer.bos), len(filler), len(FACTS) + 2).astype(int)
    runs = [tokenizer.text(filler[a:b]) for a, b in pairwise(cuts)]
    whole = runs[0] + "".join(f"{fact}{run}" for fact, run in zip(told, runs[1:], strict=True))
    at = np.linspace(0, len(FACTS) - 1, n_asked).round().astype(int)
    return RetrievalTask("facts", n, whole, tuple(FACTS[i] for i in at))


def pairs(tokenizer: TextTokenizer, given: Sequence[Fact], n: int, n_asked: int) -> RetrievalTask:
    """The key-value pairs that fit n tokens, of which `n_asked` are asked for."""
    told: list[Fact] = []
    n_left = n
    for fact in given:
        n_left -= len(tokenizer.ids(fact.text))
        if n_left < 0:
            break
        told.append(fact)
    at = np.unique(np.linspace(0, len(told) - 1, n_asked).round().astype(int))
    asked = tuple(
        Asked("What follows this key?", fact.question, fact.answer)
        for fact in (told[i] for i in at)
    )
    return RetrievalTask("pairs", n, "".join(fact.text for fact in told), asked)


async def prompt(engine: EmbeddedEngine, task: RetrievalTask, asked: Asked) -> Ids:
    """The tokens of a chat whose only message has the text and the question, up to the beginning
    of the reply; without a template, those of the text and the beginning of the reply."""
    if engine.info.chat_template:
        content = f"{task.text}\n\n{asked.question}"
        messages = [{"role": "user", "content": content}]
        data = encode({"messages": messages})
        rendered = await engine.wire.call(len(data), engine.wire.model.apply_template, data)
        text = str(msgspec.json.decode(rendered)["prompt"])
    else:
        text = f"{task.text}\n"
    return await engine.tokenize(text + asked.begin, add_special=True, parse_special=True)


async def found(
    service: Service[EmbeddedEngine], task: RetrievalTask, live: LiveBudget, facts: Sequence[Asked]
) -> list[bool]:
    """Which of `facts` are found at temperature 0."""
    right = []
    for asked in facts:
        request = GenerateRequest(
            ids=await prompt(service.engine, task, asked),
            fields={"temperature": 0},
            n_predict=_ANSWER_TOKENS,
            live=live,
            scope=f"{task.name} {task.n} {live.policy} {live.tokens}",
        )  # another scope, so that no budget has rows of another one
        reply = ""
        async for event in service.sessions.run(request):
            reply += event.text if isinstance(event, Piece) else ""
        right.append(reply.strip().startswith(asked.answer))
    return right


async def measure(
    service: Service[EmbeddedEngine],
    tasks: Sequence[RetrievalTask],
    policies: Sequence[str],
    budgets: Sequence[int],
    advance: Callable[[int], object],
) -> list[dict[str, Any]]:
    """A row for each task and budget: how many facts the full cache finds, and how many of these
    each policy finds; `depths` has the result for each fact. advance: called with the number of
    questions that were asked, or need not be: what the full cache does not find."""
    rows = []
    for task in tasks:
        full = await found(service, task, LiveBudget(), task.asked)
        advance(len(task.asked))
        known = [fact for fact, is_known in zip(task.asked, full, strict=True) if is_known]
        for budget in budgets:
            depths: dict[str, list[bool]] = {"full": full}
            for policy in policies:
                live = LiveBudget(policy, budget)
                depths[policy] = await found(service, task, live, known) if known else []
                advance(len(task.asked))
            counts: Mapping[str, int] = {name: sum(right) for name, right in depths.items()}
            place = {"task": task.name, "tokens": task.n, "live": budget, "asked": len(full)}
            rows.append({**place, **counts, "depths": depths})
    return rows


def share_found(rows: Sequence[Mapping[str, Any]], policy: str, budget: int) -> float | None:
    """The share of facts found with the full cache that a policy finds; None: there are none."""
    own = [row for row in rows if row["live"] == budget]
    n_full = sum(row["full"] for row in own)
    return sum(row[policy] for row in own) / n_full if n_full else None
