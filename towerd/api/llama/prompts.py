"""The prompt field: text, token ids, a mix of both, or a list of any of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from towerd.api.http import fields
from towerd.api.http.off_loop import by_size, size_of
from towerd.engine.base import Engine
from towerd.errors import ContextExceeded, InvalidRequest, NotSupported
from towerd.tokens import Ids

Parts: TypeAlias = list["str | Ids"]
"""One prompt: texts to tokenize and ids as given, in order."""

TEXTS_MAX = 16_384
"""Texts in one prompt, each of which is tokenized separately."""
COUNTED_CHARS_MAX = 1 << 20
_FORMS = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt '
    "string, or a list of mixed strings & tokens."
)


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The limit on the prompts of one request, in tokens."""

    n_ctx: int
    outgrown_max: int = 0
    """Total tokens of the prompts that exceed the context; 0: none may exceed it."""

    def check(self, lengths: Sequence[int], *, are_least: bool = False) -> None:
        """Raises ContextExceeded unless prompts of these lengths may be evaluated. are_least: they
        may be longer, since they were not tokenized."""
        outgrown = [n for n in lengths if n >= self.n_ctx]
        if not outgrown or sum(outgrown) <= self.outgrown_max:
            return
        if not self.outgrown_max:
            raise ContextExceeded.of_request(outgrown[0], self.n_ctx, is_least=are_least)
        least = "at least " if are_least else ""
        raise ContextExceeded(
            f"request ({least}{sum(outgrown)} tokens) exceeds the limit of prompts longer than the context "
            f"({self.outgrown_max} tokens), see --prompt-tokens-max",
            n_prompt_tokens=sum(outgrown),
            n_ctx=self.n_ctx,
        )


async def tokenize_prompts(
    prompt: Any, engine: Engine, limit: PromptLimit, prompts_max: int
) -> list[Ids]:
    """The token ids of every prompt of a request: at least one prompt, none empty, within `limit`.

    Raises InvalidRequest, ContextExceeded."""
    n_vocab = engine.info.n_vocab
    plans = await by_size(size_of(prompt), _plan, prompt, n_vocab, limit, prompts_max)
    limit.check([least_tokens(plan, engine.token_bytes_max) for plan in plans], are_least=True)
    prompts = [await _tokenize(p, engine, add_special=True, parse_special=True) for p in plans]
    if not prompts or not all(len(ids) for ids in prompts):
        raise InvalidRequest('"prompt" must not be empty')
    limit.check([len(ids) for ids in prompts])
    return prompts


async def tokenize_mixed(
    content: Any, engine: Engine, *, add_special: bool, parse_special: bool
) -> Ids:
    """Convert text, ids or a list of both to ids; only text at the very front gets the BOS token.

    Raises InvalidRequest."""
    if not isinstance(content, str | list):
        raise fields.wrong_type("content", "string or array", content)
    parts = await by_size(size_of(content), _parts, content, engine.info.n_vocab)
    return await _tokenize(parts, engine, add_special=add_special, parse_special=parse_special)


def least_tokens(parts: Parts, token_bytes_max: int) -> int:
    """How many tokens a prompt has at least, by its length alone. Texts that are not very long are
    left out: they are counted, as clients shorten theirs by the right number."""
    texts = [len(part) for part in parts if isinstance(part, str)]
    if not token_bytes_max or max(texts, default=0) <= COUNTED_CHARS_MAX:
        return 0
    n_ids = sum(len(part) for part in parts if not isinstance(part, str))
    return n_ids + sum(n // token_bytes_max for n in texts)  # a character is a byte or more


def checked_ids(values: Any, n_vocab: int) -> Ids:
    """Integers as token ids of a vocabulary of `n_vocab`. Raises InvalidRequest."""
    try:
        ids = np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise InvalidRequest("Prompt contains invalid tokens") from None
    if len(ids) and (ids.min() < 0 or ids.max() >= n_vocab):
        raise InvalidRequest("Prompt contains invalid tokens")
    return ids.astype(np.int32)


def _plan(prompt: Any, n_vocab: int, limit: PromptLimit, prompts_max: int) -> list[Parts]:
    """The parts of every prompt. Too many token ids are refused by their number, before they are
    processed."""
    if not isinstance(prompt, list) or any(type(item) is int for item in prompt):
        prompt = [prompt]
    elif len(prompt) > prompts_max:
        raise InvalidRequest(f'"prompt" may hold at most {prompts_max} prompts')
    limit.check([_n_ids(part) for part in prompt])
    return [_one(part, n_vocab) for part in prompt]


def _n_ids(prompt: Any) -> int:
    """The number of token ids if the prompt is a list of them, else 0."""
    is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
    return len(prompt) if is_ids else 0


def _one(prompt: Any, n_vocab: int) -> Parts:
    if isinstance(prompt, dict):
        if "prompt_string" not in prompt:
            raise InvalidRequest(_FORMS)
        if prompt.get("multimodal_data"):
            raise NotSupported(
                "Only text can be precached: pictures and sounds stay with the chats that show them"
            )
        prompt = prompt["prompt_string"]
    return _parts(prompt, n_vocab)


def _parts(content: Any, n_vocab: int) -> Parts:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(_FORMS)
    if sum(isinstance(item, str) for item in content) > TEXTS_MAX:
        raise InvalidRequest(f'"prompt" may hold at most {TEXTS_MAX} texts among its tokens')
    parts: Parts = []
    run: list[int] = []
    for item in content:
        if type(item) is int:
            run.append(item)
            continue
        if not isinstance(item, str):
            raise InvalidRequest(_FORMS)
        if run:
            parts.append(checked_ids(run, n_vocab))
            run = []
        parts.append(item)
    if run:
        parts.append(checked_ids(run, n_vocab))
    return parts


async def _tokenize(parts: Parts, engine: Engine, *, add_special: bool, parse_special: bool) -> Ids:
    out: list[Ids] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            first = add_special and index == 0
            out.append(await engine.tokenize(part, add_special=first, parse_special=parse_special))
        else:
            out.append(part)
    if len(out) == 1:
        return out[0]
    return cast(Ids, np.concatenate(out)) if out else np.zeros(0, np.int32)
