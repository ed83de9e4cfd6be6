"""Our requests as /completion bodies, and its streamed chunks as our events."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from towerd.engine.base import (
    GenerateRequest,
    Piece,
    Progress,
    SamplingParams,
    Timings,
    TokenProb,
    TokenProbs,
)
from towerd.engine.llama_server.wire import Reply
from towerd.errors import TowerdError

READ_BYTES_MAX = 64 * 1024
_SAME_NAME = (
    "seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p",
    "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n",
    "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta",
    "min_keep", "ignore_eos", "n_probs", "post_sampling_probs",
)  # fmt: skip


def completion_body(request: GenerateRequest, slot: int) -> dict[str, Any]:
    """The body of a pinned, streamed /completion with exact token ids."""
    sampling = request.sampling
    body: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME_NAME}
    if sampling.grammar:
        body["grammar"] = sampling.grammar
    return body | {
        "prompt": request.ids,
        "id_slot": slot,
        "stream": True,
        "return_tokens": True,
        "return_progress": request.return_progress,
        "cache_prompt": request.cache_prompt,
        "n_cache_reuse": 0,  # moved rows are approximations, and the slot is stored later
        "n_predict": request.n_predict,
        "n_keep": request.n_keep,
        "stop": list(request.stop),
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "samplers": list(sampling.samplers),
        "logit_bias": _bias(sampling),
    }


def _bias(sampling: SamplingParams) -> list[list[Any]]:
    return [
        [token, False if math.isinf(added) and added < 0 else added]
        for token, added in sampling.logit_bias
    ]


async def chunks(reply: Reply) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of an SSE stream. Raises the TowerdError that llama-server reports."""
    rest = b""
    while data := await reply.read(READ_BYTES_MAX):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise TowerdError(str(chunk["error"].get("message", "llama-server failed")))
                yield chunk


def progress_of(chunk: Mapping[str, Any]) -> Progress | None:
    """The chunk's prompt progress, if it is one of those."""
    value = chunk.get("prompt_progress")
    if value is None:
        return None
    return Progress(value["total"], value["cache"], value["processed"], float(value["time_ms"]))


def piece_of(chunk: Mapping[str, Any]) -> Piece:
    """The chunk's text, tokens and probabilities."""
    probs = tuple(_probs(entry) for entry in chunk.get("completion_probabilities", ()))
    return Piece(chunk["content"], tuple(chunk.get("tokens", ())), probs)


def timings_of(chunk: Mapping[str, Any]) -> Timings:
    """The timings of a final chunk."""
    value = chunk["timings"]
    return Timings(
        value["cache_n"], value["prompt_n"], float(value["prompt_ms"]),
        value["predicted_n"], float(value["predicted_ms"]),
    )  # fmt: skip


def _probs(entry: Mapping[str, Any]) -> TokenProbs:
    top = entry.get("top_logprobs", entry.get("top_probs", ()))
    return TokenProbs(_prob(entry), tuple(_prob(each) for each in top))


def _prob(entry: Mapping[str, Any]) -> TokenProb:
    logprob = entry.get("logprob")
    if logprob is None:
        logprob = math.log(max(float(entry["prob"]), 1e-45))
    return TokenProb(int(entry["id"]), bytes(entry["bytes"]), float(logprob))
