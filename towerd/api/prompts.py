"""The prompt field: text, token ids, a mix of both, or a list of any of these."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np

from towerd.api import fields
from towerd.api.off_loop import by_size, size_of
from towerd.engine.base import Engine, Ids
from towerd.errors import InvalidRequest, NotSupported

Parts: TypeAlias = list["str | Ids"]
"""One prompt: texts to tokenize and ids as given, in order."""

_FORMS = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt '
    "string, or a list of mixed strings & tokens."
)


async def tokenize_prompts(prompt: Any, engine: Engine, prompts_max: int) -> list[Ids]:
    """Every prompt of a request, at least one, each at least one token. Raises InvalidRequest."""
    plans = await by_size(size_of(prompt), _plan, prompt, engine.info.n_vocab, prompts_max)
    prompts = [await _tokenize(p, engine, add_special=True, parse_special=True) for p in plans]
    if not prompts or not all(len(ids) for ids in prompts):
        raise InvalidRequest('"prompt" must not be empty')
    return prompts


async def tokenize_mixed(
    content: Any, engine: Engine, *, add_special: bool, parse_special: bool
) -> Ids:
    """Text, ids or a list of both to ids; only text at the very front gets the BOS token.

    Raises InvalidRequest."""
    if not isinstance(content, str | list | np.ndarray):
        raise fields.wrong_type("content", "string or array", content)
    parts = await by_size(size_of(content), _parts, content, engine.info.n_vocab)
    return await _tokenize(parts, engine, add_special=add_special, parse_special=parse_special)


def checked_ids(values: Any, n_vocab: int) -> Ids:
    """Integers as token ids of a vocabulary of `n_vocab`. Raises InvalidRequest."""
    try:
        ids = np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise InvalidRequest("Prompt contains invalid tokens") from None
    if len(ids) and (ids.min() < 0 or ids.max() >= n_vocab):
        raise InvalidRequest("Prompt contains invalid tokens")
    return ids.astype(np.int32)


def _plan(prompt: Any, n_vocab: int, prompts_max: int) -> list[Parts]:
    """The parts of every prompt."""
    if not isinstance(prompt, list) or any(type(item) is int for item in prompt):
        return [_one(prompt, n_vocab)]
    if len(prompt) > prompts_max:
        raise InvalidRequest(f'"prompt" may hold at most {prompts_max} prompts')
    return [_one(part, n_vocab) for part in prompt]


def _one(prompt: Any, n_vocab: int) -> Parts:
    if isinstance(prompt, dict):
        if "prompt_string" not in prompt:
            raise InvalidRequest(_FORMS)
        if prompt.get("multimodal_data"):
            raise NotSupported(
                "The embedded engine reads text only; the llama-server engine reads "
                "multimodal prompts"
            )
        prompt = prompt["prompt_string"]
    return _parts(prompt, n_vocab)


def _parts(content: Any, n_vocab: int) -> Parts:
    if isinstance(content, str):
        return [content]
    if isinstance(content, np.ndarray):
        return [checked_ids(content, n_vocab)]
    if not isinstance(content, list):
        raise InvalidRequest(_FORMS)
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
