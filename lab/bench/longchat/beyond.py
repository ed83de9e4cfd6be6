"""A chat of three contexts: whether it remembers what its first tenth told.

The chat is held turn by turn, in a context that a third of it fills; at its end each question is a branch
of it. How much the same chat finds where the context has room for all of it is measured beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lab.bench.longchat.retrieval import Asked, answer, passkeys, prompt
from lab.texts.tokenizer import Ids, TextTokenizer
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.errors import ConfigError
from towerd.service import Service

CONTEXTS = 3
TURNS = 6
REPLY_TOKENS = 8
ROOM_TOKENS = 1024
"""For a chat's template, questions and replies beside its messages."""
_ONWARD = Asked("passkeys", "What do you think about this?", "I think", ("",))


@dataclass(frozen=True, slots=True)
class LongChat:
    """The user's messages of a chat, and questions about the first of them."""

    messages: tuple[str, ...]
    asked: tuple[Asked, ...]


def long_chat(tokenizer: TextTokenizer, filler: Ids, n_ctx: int, n_asked: int) -> LongChat:
    """A chat of CONTEXTS contexts of `n_ctx` tokens, whose first tenth tells `n_asked` pass keys. Raises
    ConfigError if the filler is too short."""
    told = passkeys(np.random.default_rng(7))[:n_asked]
    n = CONTEXTS * n_ctx
    if len(filler) < n:
        raise ConfigError(f"A chat of {n} tokens needs a longer text.")
    n_first = n // 10
    n_told = sum(len(tokenizer.ids(text)) for text, _ in told)
    cuts = np.linspace(0, max(0, n_first - n_told), len(told) + 1).astype(int)
    runs = [tokenizer.text(filler[a:b]) for a, b in pairwise(cuts)]
    first = "".join(run + text for run, (text, _) in zip(runs, told, strict=True))
    ends = np.linspace(0, n - n_told, TURNS + 1).astype(int)
    parts = [tokenizer.text(filler[a:b]) for a, b in pairwise(ends)]
    parts[0] = first + tokenizer.text(filler[cuts[-1] : ends[1]])
    return LongChat(tuple(parts), tuple(asked for _, asked in told))


async def scores(
    service: Service[EmbeddedEngine],
    tokenizer: TextTokenizer,
    chat: LongChat,
    live: LiveBudget,
    advance: Callable[[int], object],
) -> list[float]:
    """The score of each question at the end of the chat. advance: called with the number of tokens of
    messages that were said."""
    said: list[str] = []
    for message in chat.messages[:-1]:
        said.append(message)
        ids = await prompt(service.engine, said, _ONWARD)
        reply, _ = await answer(service, ids, REPLY_TOKENS, live)
        said.append(_ONWARD.begin + reply)
        said[-2] = f"{message}\n\n{_ONWARD.question}"
        advance(len(tokenizer.ids(message)))
    found = []
    for asked in chat.asked:
        ids = await prompt(service.engine, [*said, chat.messages[-1]], asked)
        reply, _ = await answer(service, ids, asked.n_predict(tokenizer), live)
        found.append(asked.score(reply))
    advance(len(tokenizer.ids(chat.messages[-1])))
    return found


def share(found: Sequence[float], full: Sequence[float]) -> float | None:
    """What was found of what the full cache finds; None: that is nothing."""
    known = [score for score, of_full in zip(found, full, strict=True) if of_full]
    return sum(known) / len(known) if known else None
