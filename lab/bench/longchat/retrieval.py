"""Retrieval from a long prompt under live budgets: what a chat finds of what it was told.

One document states facts of several kinds at all depths. It is read once; each question at its end is a
branch of it, like an edited message, and each budget answers from the same exact rows.

    passkeys   the pass key of one of several doors
    facts      a name, a year, a colour: all of different kinds
    pairs      the value of one of many random keys
    quotes     the next 40 tokens of a passage, word by word
    spread     what is told in several places, combined
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import msgspec
import numpy as np

from lab.bench.longchat.reading import bytes_aside
from lab.texts.tasks import DIGITS, N_DIGITS, Fact, random_pair, spelled
from lab.texts.tokenizer import Ids as TextIds
from lab.texts.tokenizer import TextTokenizer
from towerd.engine.base import GenerateRequest, LiveBudget, Piece, encode
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.errors import ConfigError
from towerd.service import Service
from towerd.tokens import Ids

KINDS = ("passkeys", "facts", "pairs", "quotes", "spread")
TOLD = KINDS[:3]
"""The kinds that are found or not, by which `POLICY_found_BUDGET` counts."""
N_PAIRS = 24
"""Pairs in a document; most of them are distractors."""
N_QUOTES = 4
QUOTE_TOKENS = 40
_LEAD_TOKENS = 16
"""Tokens of a quotation that the reply begins with."""
_PASSAGE_TOKENS = _LEAD_TOKENS + QUOTE_TOKENS
SPARE_TOKENS = 128
"""Room for a question and its reply behind a document."""
_MORE_TOKENS = 2
"""Tokens of a reply beyond its answer."""
_WORDS_BETWEEN = 12
"""Tokens of a reply for each answer of several, with the words between them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a document. The reply is started with `begin`, which a small model would not
    always generate, and has to continue with the only one of `answers`, or to contain all."""

    kind: str
    question: str
    begin: str
    answers: tuple[str, ...]

    def score(self, reply: str) -> float:
        """How much of it a reply has right, from 0 to 1: of a quotation the beginning, of several
        answers those that it contains."""
        if self.kind == "spread":
            return sum(answer in reply for answer in self.answers) / len(self.answers)
        said, (answer,) = reply.strip(), self.answers
        if self.kind != "quotes":
            return float(said.startswith(answer))
        return len(commonprefix([said, answer])) / len(answer)

    def n_predict(self, tokenizer: TextTokenizer) -> int:
        """Tokens that the reply may have."""
        if self.kind == "spread":
            return _WORDS_BETWEEN * len(self.answers)
        return len(tokenizer.ids(f" {self.answers[0]}")) + _MORE_TOKENS


def _fact(question: str, begin: str, answer: str) -> Asked:
    return Asked("facts", question, begin, (answer,))


FACTS = (
    _fact("What is the secret word?", "The secret word is", "mango"),
    _fact("In which year was Anna born?", "Anna was born in the year", "1987"),
    _fact("What is Anna's dog called?", "Anna's dog is called", "Rufus"),
    _fact("When does the ferry leave?", "The ferry leaves on", "Thursday"),
    _fact("What is the number of the bus?", "The number of the bus is", "482"),
    _fact("What is Peter's favourite colour?", "Peter's favourite colour is", "purple"),
    _fact("What is the hotel called?", "The hotel is called the", "Meridian"),
    _fact("What does Maria work as?", "Maria works as a", "dentist"),
)
"""All of different kinds: a small model confuses several of one kind, even if it sees them."""
DOORS = ("red", "green", "blue", "yellow", "black", "white", "orange", "brown")
CODES = {
    "garden": ("Lisbon", "Oslo", "Vienna", "Prague"),
    "river": ("Dublin", "Athens", "Warsaw", "Madrid"),
}


@dataclass(frozen=True, slots=True)
class Document:
    """A text of about `n` tokens, and the questions about it."""

    n: int
    text: str
    asked: tuple[Asked, ...]


def passkeys(chance: np.random.Generator) -> list[tuple[str, Asked]]:
    """Pass keys of several doors, as (what is told, what is asked); "Landmark Attention" (Mohtashami and
    Jaggi, 2023) has one."""
    found = []
    for door in DOORS:
        key = spelled(chance, DIGITS, N_DIGITS)
        begin = f"The pass key of the {door} door is"
        asked = Asked("passkeys", f"What is the pass key of the {door} door?", begin, (key,))
        found.append((f"\n{begin} {key}. Remember it.\n", asked))
    return found


def pairs(given: Iterable[Fact]) -> list[tuple[str, Asked]]:
    """Key-value pairs, as in "Lost in the Middle" (Liu and others, 2023)."""
    question = "Which value follows the key in this line?"
    return [
        (f"\n{each.text}", Asked("pairs", question, each.question.strip(), (each.answer,)))
        for each in given
    ]


def codes() -> list[tuple[list[str], Asked]]:
    """Codes of several parts, each told in a place of its own: (what is told, what is asked)."""
    found = []
    for name, words in CODES.items():
        lines = [f"Part {letter} of the {name} code is" for letter in "ABCD"]
        told = [f"\n{line} {word}.\n" for line, word in zip(lines, words, strict=True)]
        question = f"What are the four parts of the {name} code?"
        found.append((told, Asked("spread", question, lines[0], words)))
    return found


def document(
    tokenizer: TextTokenizer,
    filler: TextIds,
    n: int,
    told_pairs: Sequence[Fact] = (),
    seed: int = 0,
) -> Document:
    """Everything that is asked for, spread over a text of `n` tokens whose rest is `filler`, in an order
    by chance; longer where a tokenizer needs more for it. told_pairs: key-value pairs to tell; none:
    random ones. Raises ConfigError if the filler is too short."""
    chance = np.random.default_rng(seed)
    texts, asked = _told(chance, told_pairs)
    n_filler = max(n - sum(len(tokenizer.ids(text)) for text in texts), N_QUOTES * _PASSAGE_TOKENS)
    if len(filler) < n_filler:
        raise ConfigError(f"A document of {n} tokens needs a longer text.")
    filler = filler[:n_filler]
    blocks = np.array_split(np.arange(len(texts)), N_QUOTES)
    cuts = np.linspace(0, n_filler, N_QUOTES + 1).astype(int)
    runs = [tokenizer.text(filler[a:b]) for a, b in pairwise(cuts)]
    whole = "".join(
        run + "".join(texts[i] for i in block) for run, block in zip(runs, blocks, strict=True)
    )
    questions = (*asked, *quotes(tokenizer, filler, cuts[:-1]))
    return Document(len(tokenizer.ids(whole)), whole, questions)


def _told(chance: np.random.Generator, told_pairs: Sequence[Fact]) -> tuple[list[str], list[Asked]]:
    """(what is told, in an order by chance but for the parts of a code; what is asked)."""
    facts = [(f"\nRemember this: {each.begin} {each.answers[0]}.\n", each) for each in FACTS]
    given = list(told_pairs[:N_PAIRS]) or [random_pair(chance) for _ in range(N_PAIRS)]
    told = [*passkeys(chance), *facts, *pairs(given)]
    texts = [(chance.random(), text) for text, _ in told]
    for lines, _ in codes():
        texts += zip(sorted(chance.random(len(lines))), lines, strict=True)
    return [text for _, text in sorted(texts)], [each for _, each in (*told, *codes())]


def quotes(tokenizer: TextTokenizer, filler: TextIds, starts: Iterable[int]) -> list[Asked]:
    """Passages of the filler behind these tokens of it."""
    found = []
    for start in starts:
        middle, stop = start + _LEAD_TOKENS, start + _LEAD_TOKENS + QUOTE_TOKENS
        lead = tokenizer.text(filler[start:middle]).strip()
        answer = tokenizer.text(filler[middle:stop]).strip()
        question = "Repeat this passage of the text word by word."
        found.append(Asked("quotes", question, lead, (answer,)))
    return found


async def prompt(engine: EmbeddedEngine, messages: Sequence[str], asked: Asked) -> Ids:
    """The tokens of a chat, up to the beginning of its reply: messages of user and assistant in turn, of
    which the last is the user's and ends with the question. Without a template, those of the texts."""
    *before, last = messages
    if engine.info.chat_template:
        texts = [*before, f"{last}\n\n{asked.question}"]
        chat = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        ]
        data = encode({"messages": chat})
        rendered = await engine.wire.call(len(data), engine.wire.model.apply_template, data)
        text = str(msgspec.json.decode(rendered)["prompt"])
    else:
        text = "\n".join([*messages, ""])
    return await engine.tokenize(text + asked.begin, add_special=True, parse_special=True)


async def answer(
    service: Service[EmbeddedEngine],
    ids: Ids,
    n_predict: int,
    live: LiveBudget,
    *,
    ignore_eos: bool = False,
) -> tuple[str, int]:
    """(the reply at temperature 0, RAM beside the live rows when it ended). ignore_eos: it ends with its
    last token only"""
    fields = {"temperature": 0, "ignore_eos": ignore_eos}
    request = GenerateRequest(ids=ids, fields=fields, n_predict=n_predict, live=live)
    pieces = [
        event.text async for event in service.sessions.run(request) if isinstance(event, Piece)
    ]
    return "".join(pieces), await bytes_aside(service.engine, live)


async def measure(
    service: Service[EmbeddedEngine],
    tokenizer: TextTokenizer,
    document: Document,
    lives: Sequence[LiveBudget],
    n_each: int,
    advance: Callable[[int], object],
) -> list[dict[str, Any]]:
    """A row for the full cache, and one for each budget: by kind, the sum of the scores of at most `n_each`
    questions that the full cache answers (`chosen`); `scores` has each. advance: called with the number of
    questions that were asked, or need not be."""
    full = await _asked(service, tokenizer, document, document.asked, LiveBudget(), advance)
    known = chosen(
        [each for each, score in zip(document.asked, full[0], strict=True) if score], n_each
    )
    of_known = [score for each, score in zip(document.asked, full[0], strict=True) if each in known]
    rows = [_row(document, known, of_known, LiveBudget(), full[1])]
    rows[0]["scores"] = _listed(document.asked, full[0])
    n_left_out = n_questions(document, [LiveBudget()], n_each) - len(document.asked) - len(known)
    for live in _fitting(document, lives):
        scores, aside_bytes = await _asked(service, tokenizer, document, known, live, advance)
        advance(n_left_out)
        rows.append(_row(document, known, scores, live, aside_bytes))
    return rows


async def _asked(
    service: Service[EmbeddedEngine],
    tokenizer: TextTokenizer,
    document: Document,
    questions: Sequence[Asked],
    live: LiveBudget,
    advance: Callable[[int], object],
) -> tuple[list[float], int]:
    """(the score of each question, the most RAM beside the live rows)."""
    scores, aside_bytes = [], 0
    for asked in questions:
        ids = await prompt(service.engine, [document.text], asked)
        n_predict, combines = asked.n_predict(tokenizer), asked.kind == "spread"
        reply, n_bytes = await answer(service, ids, n_predict, live, ignore_eos=combines)
        scores.append(asked.score(reply))
        aside_bytes = max(aside_bytes, n_bytes)
        advance(1)
    return scores, aside_bytes


def _row(
    document: Document,
    known: Sequence[Asked],
    scores: Sequence[float],
    live: LiveBudget,
    aside_bytes: int,
) -> dict[str, Any]:
    pairs = list(zip(known, scores, strict=True))
    by_kind = {kind: sum(score for asked, score in pairs if asked.kind == kind) for kind in KINDS}
    place = {"tokens": document.n, "policy": live.policy, "scope": live.scope, "live": live.tokens}
    return {**place, **by_kind, "aside_bytes": aside_bytes, "scores": _listed(known, scores)}


def _listed(questions: Sequence[Asked], scores: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"kind": asked.kind, "begin": asked.begin, "score": score}
        for asked, score in zip(questions, scores, strict=True)
    ]


def chosen(questions: Sequence[Asked], n_each: int) -> list[Asked]:
    """At most `n_each` questions of a kind, of those with long answers half as many, spread over those that
    there are."""
    found: list[Asked] = []
    for kind in KINDS:
        own = [each for each in questions if each.kind == kind]
        n_asked = min(n_each if kind in TOLD else (n_each + 1) // 2, len(own))
        at = np.unique(np.linspace(0, len(own) - 1, n_asked).round().astype(int))
        found += [own[i] for i in at]
    return found


def n_questions(document: Document, lives: Sequence[LiveBudget], n_each: int) -> int:
    """The number of questions that `measure` asks at most."""
    n_known, n_lives = len(chosen(document.asked, n_each)), len(_fitting(document, lives))
    return len(document.asked) + n_known * n_lives


def _fitting(document: Document, lives: Sequence[LiveBudget]) -> list[LiveBudget]:
    return [each for each in lives if each.tokens < document.n]


def share_found(
    rows: Sequence[Mapping[str, Any]], live: LiveBudget, kinds: Sequence[str]
) -> float | None:
    """What is found under a budget of these kinds, over what the full cache finds in the same documents;
    None: it finds nothing."""
    place = {"policy": live.policy, "scope": live.scope, "live": live.tokens}
    own = [row for row in rows if place.items() <= row.items()]
    lengths = {row["tokens"] for row in own}
    full = [row for row in rows if row["policy"] == "none" and row["tokens"] in lengths]
    of_all = sum(row[kind] for row in full for kind in kinds)
    return sum(row[kind] for row in own for kind in kinds) / of_all if of_all else None
