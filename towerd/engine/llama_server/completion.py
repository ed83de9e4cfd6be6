"""Our requests as /completion bodies, and its streamed chunks as our events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import ClientResponse

from towerd.engine.base import GenerateRequest, Piece, Progress, Timings
from towerd.engine.llama_server.process.client import read
from towerd.errors import TowerdError

READ_BYTES_MAX = 64 * 1024


def completion_body(request: GenerateRequest, slot: int) -> dict[str, Any]:
    """The body of a pinned, streamed /completion with exact token ids."""
    return {
        **request.fields,
        "prompt": request.ids,
        "id_slot": slot,
        "stream": True,
        "return_tokens": True,
        "return_progress": request.return_progress,
        "cache_prompt": request.cache_prompt,
        "n_cache_reuse": 0,  # moved rows are approximations, and the slot is stored later
        "n_predict": request.n_predict,
        "n_keep": request.n_keep,
    }


async def chunks(reply: ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of an SSE stream. Raises the TowerdError that llama-server reports."""
    rest = b""
    while data := await read(reply, READ_BYTES_MAX):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise TowerdError(str(chunk["error"].get("message", "llama-server failed")))
                yield chunk


def progress_of(chunk: Mapping[str, Any]) -> Progress | None:
    """The chunk's prompt progress; None if it has none."""
    value = chunk.get("prompt_progress")
    if value is None:
        return None
    return Progress(value["total"], value["cache"], value["processed"], float(value["time_ms"]))


def piece_of(chunk: Mapping[str, Any]) -> Piece:
    """The chunk's text and tokens."""
    return Piece(chunk["content"], tuple(chunk.get("tokens", ())))


def timings_of(chunk: Mapping[str, Any]) -> Timings:
    """The timings of a final chunk."""
    value = chunk["timings"]
    return Timings(
        cache_n=value["cache_n"],
        prompt_n=value["prompt_n"],
        prompt_ms=float(value["prompt_ms"]),
        predicted_n=value["predicted_n"],
        predicted_ms=float(value["predicted_ms"]),
    )
