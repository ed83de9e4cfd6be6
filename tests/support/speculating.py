"""Requests of a service with speculation, and what of a reply must be as without."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from services import EmbeddedService

from towerd.engine.base import Finish, GenerateRequest, LiveBudget, encode
from towerd.wire import Reply, Request, Writer

EVEN = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
"""With these the shape of a batch hardly shows in what it computes."""
Said: TypeAlias = dict[str, Any]
GIST = ("ids", "content", "stop_type", "stopping_word", "truncated", "tokens_predicted")


async def say(
    service: EmbeddedService,
    prompt: str | list[int],
    live: LiveBudget | None = None,
    scope: str = "local",
    **fields: Any,
) -> Said:
    """An answer to /completion, and under `ids` its tokens."""
    body = {"temperature": 0, "n_predict": 80, "cache_prompt": False, **fields, "prompt": prompt}
    assert service.engine.wire is not None
    wire = Request(service.engine.wire.model, "completion", encode(body))
    reply, writer = Reply(wire, 0), Writer(wire)
    request = GenerateRequest(
        ids=wire.prompts[0],
        reply=reply,
        n_predict=wire.n_predict,
        cache_prompt=body["cache_prompt"],
        live=live or LiveBudget(),
        scope=scope,
    )
    finish: Finish | None = None
    async for event in service.sessions.run(request):
        if isinstance(event, Finish):
            finish = event
    assert finish is not None
    answer: Said = json.loads(writer.final(reply, 0, finish.n_cached, b""))
    return answer | {"ids": list(finish.ids)}


def gist(answer: Said) -> Said:
    """What a reply is, without the time that it took and its probabilities."""
    return {key: answer[key] for key in GIST}


def drafted(answer: Said) -> tuple[int, int]:
    """(tokens that were drafted, those that were right)."""
    timings = answer["timings"]
    return timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
