"""The JSON of completions: llama-server's native shape and its two OpenAI ones. Pure functions."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from towerd import __version__
from towerd.api.choice import Choice
from towerd.api.reply import encode
from towerd.api.settings import finite, settings_json
from towerd.api.task import Shape, Task
from towerd.drift import Drift
from towerd.engine.base import Piece, Progress, Reuse, Timings, TokenProb, TokenProbs

FINGERPRINT = f"towerd-{__version__}"

Json = dict[str, Any]


def timings_json(timings: Timings) -> Json:
    """llama-server's `timings`. The first predicted token comes out of the prompt's evaluation,
    so the rates of prediction count one token less."""
    steps = max(timings.predicted_n - 1, 0)
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": float(timings.prompt_ms),
        "prompt_per_token_ms": _ratio(timings.prompt_ms, timings.prompt_n),
        "prompt_per_second": _ratio(1e3 * timings.prompt_n, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": float(timings.predicted_ms),
        "predicted_per_token_ms": _ratio(timings.predicted_ms, steps),
        "predicted_per_second": _ratio(1e3 * steps, timings.predicted_ms),
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def usage_json(choices: Sequence[Choice], n_per_prompt: int) -> Json:
    """Tokens of all choices; a prompt counts once however many choices it has."""
    completion = sum(choice.timings().predicted_n for choice in choices)
    prompts = choices[::n_per_prompt]
    prompt = sum(choice.n_prompt for choice in prompts)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(c.timings().cache_n for c in prompts)},
    }


def reuse_json(reuse: Reuse) -> Json:
    tiers = {"live": reuse.live, "hot": reuse.hot, "warm": reuse.warm, "prefill": reuse.prefill}
    more = {"approximate": reuse.approximate, "cold": reuse.cold}
    return tiers | {name: n for name, n in more.items() if n}


def drift_json(drift: Drift | None) -> Json:
    """A drift beside the noise floor that it is read against; nulls if it was not measured."""
    if drift is None:
        return {"kl": None, "floor_kl": None}
    return {"kl": drift.kl, "floor_kl": drift.floor_kl}


def towerd_json(choice: Choice) -> Json:
    """What the last chunk of a stream says about its memory."""
    session = choice.finish.session if choice.finish else ""
    out: Json = {"reuse": reuse_json(choice.reuse), "session": session}
    if _is_truncated(choice):
        out["truncated"] = True
    if choice.reuse.approximate:
        out["drift"] = drift_json(choice.reuse.drift)
    return out


def _is_truncated(choice: Choice) -> bool:
    return choice.finish is not None and choice.finish.truncated


def probs_json(probs: Sequence[TokenProbs], post_sampling: bool) -> list[msgspec.Raw]:
    """`completion_probabilities` and `logprobs.content`, each token encoded by itself: a long
    reply's would hold the interpreter too long in one piece."""
    top_key = "top_probs" if post_sampling else "top_logprobs"
    return [
        msgspec.Raw(
            encode(
                _prob_json(token.chosen, post_sampling)
                | {top_key: [_prob_json(candidate, post_sampling) for candidate in token.top]}
            )
        )
        for token in probs
    ]


def _prob_json(prob: TokenProb, post_sampling: bool) -> Json:
    # Not final: a character cut off at the token's end is left out, other bad bytes are marked.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(prob.piece)
    out: Json = {"id": prob.id, "token": text, "bytes": list(prob.piece)}
    if post_sampling:
        out["prob"] = math.exp(prob.logprob)
    else:
        out["logprob"] = finite(prob.logprob)
    return out


def progress_json(progress: Progress) -> Json:
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": int(progress.time_ms),
    }


def finish_reason(choice: Choice) -> str:
    stop = choice.finish.stop if choice.finish else "limit"
    return "stop" if stop in ("eos", "word") else "length"


def native_final(task: Task, choice: Choice, prompt: str) -> Json:
    """The closing object of /completion. `prompt` is the evaluated prompt's text."""
    finish = choice.finish
    assert finish is not None
    request = choice.request
    tokens = choice.ids if task.return_tokens and not task.stream else []
    out = {
        "index": choice.index,
        "content": choice.text,
        "tokens": tokens,
        "id_slot": -1,
        "stop": True,
        "model": task.model,
        "tokens_predicted": finish.timings.predicted_n,
        "tokens_evaluated": choice.n_prompt,
        "generation_settings": settings_json(
            request.sampling,
            request,
            stream=task.stream,
            timings_per_token=task.timings_per_token,
        ),
        "prompt": prompt,
        "has_new_line": choice.has_new_line,
        "truncated": finish.truncated,
        "stop_type": "none" if finish.stop == "cancelled" else finish.stop,
        "stopping_word": finish.stopping_word,
        "tokens_cached": finish.n_cached,
        "timings": timings_json(finish.timings),
    }
    if choice.probs:
        out["completion_probabilities"] = _probs(choice.probs, choice)
    return nested_fields(out, task.response_fields) if task.response_fields else out


def nested_fields(value: Json, paths: Sequence[str]) -> Json:
    """`response_fields`: `a/b` picks a nested value under that very name."""
    out: Json = {}
    for path in paths:
        current: Any = value
        for key in path.split("/"):
            current = current.get(key, _ABSENT) if isinstance(current, dict) else _ABSENT
        if current is not _ABSENT:
            out[path] = current
    return out


_ABSENT = object()


def native_partial(
    task: Task, choice: Choice, piece: Piece | None, progress: Progress | None
) -> Json:
    out: Json = {
        "index": choice.index,
        "content": piece.text if piece else "",
        "tokens": list(piece.ids) if piece else [],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": choice.n_decoded,
        "tokens_evaluated": choice.n_prompt,
    }
    if piece and piece.probs:
        out["completion_probabilities"] = _probs(piece.probs, choice)
    return out | _extras(task, choice, progress)


def _probs(probs: Sequence[TokenProbs], choice: Choice) -> list[msgspec.Raw]:
    return probs_json(probs, choice.request.sampling.post_sampling_probs)


def _extras(task: Task, choice: Choice, progress: Progress | None) -> Json:
    out: Json = {}
    if task.timings_per_token:
        out["timings"] = timings_json(choice.timings())
    if progress:
        out["prompt_progress"] = progress_json(progress)
    return out


def _head(task: Task, object_name: str, choices: list[Json]) -> Json:
    return {
        "choices": choices,
        "created": int(time.time()),
        "id": task.id,
        "model": task.model,
        "system_fingerprint": FINGERPRINT,
        "object": object_name,
    }


def completion_partial(
    task: Task, choice: Choice, piece: Piece | None, progress: Progress | None
) -> Json:
    """A chunk of /v1/completions."""
    logprobs = {"content": _probs(piece.probs, choice)} if piece and piece.probs else None
    entry = {
        "text": piece.text if piece else "",
        "index": choice.index,
        "logprobs": logprobs,
        "finish_reason": None,
    }
    return _head(task, "text_completion", [entry]) | _extras(task, choice, progress)


def completion_final(task: Task, choices: Sequence[Choice]) -> Json:
    """The whole reply of /v1/completions, or (with one choice) the last chunk of its stream."""
    entries = [
        {
            "text": choice.text,
            "index": choice.index,
            "logprobs": {"content": _probs(choice.probs, choice)} if choice.probs else None,
            "finish_reason": finish_reason(choice),
        }
        for choice in choices
    ]
    return _head(task, "text_completion", entries) | _totals(task, choices)


def _totals(task: Task, choices: Sequence[Choice]) -> Json:
    n_per_prompt = 1 if len(choices) == 1 else task.n_per_prompt
    return {
        "usage": usage_json(choices, n_per_prompt),
        "timings": timings_json(choices[0].timings()),
    }


def chat_final(task: Task, choices: Sequence[Choice]) -> Json:
    """The whole reply of /v1/chat/completions."""
    entries: list[Json] = []
    for choice in choices:
        entry: Json = {
            "finish_reason": finish_reason(choice),
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
        }
        if choice.probs:
            entry["logprobs"] = {"content": _probs(choice.probs, choice)}
        entries.append(entry)
    return _head(task, "chat.completion", entries) | _totals(task, choices)


def _chat_chunk(task: Task, choice: Choice, delta: Json, reason: str | None = None) -> Json:
    entry: Json = {"finish_reason": reason, "index": choice.index, "delta": delta}
    return _head(task, "chat.completion.chunk", [entry])


def chat_partial(
    task: Task, choice: Choice, piece: Piece | None, progress: Progress | None, first: bool
) -> list[Json]:
    """The chunks of one event: the role before the first text, then the text if there is any."""
    chunks: list[Json] = []
    if first or progress:
        chunks.append(_chat_chunk(task, choice, {"role": "assistant", "content": None}))
    if piece and (piece.text or piece.probs):
        chunks.append(_chat_chunk(task, choice, {"content": piece.text}))
    if not chunks:
        return []
    if piece and piece.probs:
        chunks[-1]["choices"][0]["logprobs"] = {"content": _probs(piece.probs, choice)}
    chunks[-1] |= _extras(task, choice, progress)
    return chunks


def chat_last(task: Task, choice: Choice) -> list[Json]:
    """The closing chunk of one choice; its figures go to the usage chunk if that follows."""
    chunk = _chat_chunk(task, choice, {}, finish_reason(choice))
    if not (task.include_usage and len(task.requests) == 1):
        chunk |= _figures(choice)
    return [chunk]


def chat_usage(task: Task, choices: Sequence[Choice]) -> Json:
    """The last chunk of a chat stream that asked for usage: no choices, everybody's tokens."""
    chunk = _head(task, "chat.completion.chunk", [])
    chunk["usage"] = usage_json(choices, task.n_per_prompt)
    return chunk | (_figures(choices[0]) if len(choices) == 1 else {})


def _figures(choice: Choice) -> Json:
    return {"timings": timings_json(choice.timings()), "towerd": towerd_json(choice)}


def partial(
    task: Task, choice: Choice, piece: Piece | None, progress: Progress | None, first: bool
) -> list[Json]:
    """The chunks of one Piece or Progress in the task's shape."""
    if task.shape is Shape.NATIVE:
        return [native_partial(task, choice, piece, progress)]
    if task.shape is Shape.COMPLETION:
        return [completion_partial(task, choice, piece, progress)]
    return chat_partial(task, choice, piece, progress, first)


def last(task: Task, choice: Choice, prompt: str) -> list[Json]:
    """The closing chunks of one choice in the task's shape."""
    if task.shape is Shape.NATIVE:
        return [native_final(task, choice, prompt) | {"towerd": towerd_json(choice)}]
    if task.shape is Shape.COMPLETION:
        chunks = [completion_final(task, [choice]) | {"towerd": towerd_json(choice)}]
    else:
        chunks = chat_last(task, choice)
    if task.verbose:
        chunks[0]["__verbose"] = native_final(task, choice, prompt)
    return chunks


def whole(task: Task, choices: Sequence[Choice], prompts: Sequence[str]) -> Json | list[Json]:
    """The unstreamed reply in the task's shape. `prompts`: per choice, its prompt's text."""
    if task.shape is Shape.NATIVE:
        finals = [
            native_final(task, choice, prompt)
            for choice, prompt in zip(choices, prompts, strict=True)
        ]
        return finals[0] if len(finals) == 1 else finals
    final = chat_final if task.shape is Shape.CHAT else completion_final
    out = final(task, choices)
    if any(_is_truncated(choice) for choice in choices):  # OpenAI's shapes have no word for it
        out["towerd"] = {"truncated": True}
    if task.verbose:
        out["__verbose"] = native_final(task, choices[0], prompts[0])
    return out


def weight(choices: Sequence[Choice]) -> int:
    """Roughly how many values the final shape of `choices` has."""
    n_probs = sum(len(c.probs) * (1 + c.request.sampling.n_probs) for c in choices)
    return n_probs + sum(len(c.parts) + len(c.request.sampling.logit_bias) for c in choices)


def needs_prompt(task: Task) -> bool:
    """Whether the final shape shows the prompt's text."""
    return task.shape is Shape.NATIVE or task.verbose
