"""/towerd/v1/requests and /towerd/v1/settings: what runs, what ran, and how the daemon was set."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from aiohttp import web

from towerd.api.admin.sessions import served_tokenizer, sessions_json
from towerd.api.http.access import require_overview, slot_numbers, visible_scope
from towerd.api.http.fields import integer_query
from towerd.api.http.keys import CONFIG, LIMITS, service_of
from towerd.api.http.recent_requests import RECENT, REQUESTS_MAX, RecentRequest, speeds_json
from towerd.api.http.reply import json_reply
from towerd.engine.base import SlotView
from towerd.errors import NotFound
from towerd.sessions.divergence import Divergence
from towerd.settings.config import Config
from towerd.settings.llama_flags import canonical
from towerd.store import SessionInfo
from towerd.store.tree.scope import tenant_of

SET = "(set)"
"""Stands for the value of a secret."""
SECRET_FLAGS = frozenset(
    "-hft --hf-token --api-key --mcp-servers-json --model-url -mu --mmproj-url -mmu".split()
)
"""llama-server's flags whose values are keys, or hold keys (links may be signed)."""


async def get_requests(request: web.Request) -> web.Response:
    """The running requests of the caller's tenant, and those that ended after `?since=`, the newest
    first; of these with `?session=` its own alone."""
    since = integer_query(request, "since", 0, 0, 10**12)
    most = min(REQUESTS_MAX, request.app[LIMITS].page_max)
    limit = integer_query(request, "limit", most, 1, most)
    scope = visible_scope(request)
    slots = await service_of(request).engine.running()
    numbers = slot_numbers(request, slots)
    running = [
        _running(slot, numbers[slot.id])
        for slot in slots
        if scope is None or tenant_of(slot.scope) == tenant_of(scope)
    ]
    ended = request.app[RECENT].since(since, scope, limit, request.query.get("session"))
    finished = [each.json() for each in ended]
    tokenizer = served_tokenizer(request)
    return json_reply({"running": running, "finished": finished, "tokenizer": tokenizer})


async def get_why(request: web.Request) -> web.Response:
    """Why a request of the caller's tenant did not find more of its prompt: where that diverged from a
    stored conversation, with the text of both as long as neither is deleted."""
    found = request.app[RECENT].find(request.match_info["id"], visible_scope(request))
    divergence = found.divergence
    shown = None
    why = found.why
    if divergence is not None:
        info = await asyncio.to_thread(_session, request, found, divergence.session)
        own = await asyncio.to_thread(_session, request, found, found.finish.session)
        was_answered = found.finish.timings.predicted_n > 0
        has_text = (info or divergence.base) and (own or not was_answered)
        why = divergence.phrase(with_text=bool(has_text))
        title = "" if info is None else (await sessions_json(request, [info]))[0]["title"]
        shown = _divergence_json(divergence, title, has_text=bool(has_text))
    return json_reply({"request": found.json(), "why": why, "divergence": shown})


def _session(request: web.Request, found: RecentRequest, id: str) -> SessionInfo | None:
    """A session of the tenant of a request; None if there is none any more, or another one of that
    name."""
    with suppress(NotFound):
        info = service_of(request).store.session(id, found.scope)
        return info if info.created <= found.finished_s else None
    return None


def _divergence_json(divergence: Divergence, title: str, *, has_text: bool) -> dict[str, Any]:
    texts = divergence.texts
    return {
        "token": divergence.at,
        "known": divergence.n_known,
        "kind": divergence.kind,
        "role": divergence.role,
        "message": divergence.message,
        "messages": divergence.n_messages,
        "moved": divergence.n_moved,
        "session": divergence.session,
        "title": title,
        "base": divergence.base,
        "before": texts.before if has_text else None,
        "stored": texts.old if has_text else None,
        "sent": texts.new if has_text else None,
        "advice": divergence.advice,
    }


def _running(slot: SlotView, number: int) -> dict[str, Any]:
    return {
        "slot": number,
        "session": slot.session,
        "scope": slot.scope,
        "tokens": slot.n_tokens,
        "prompt_evaluated": slot.n_prompt_processed,
        "prompt_reused": slot.n_prompt_cached,
        "generated": slot.n_decoded,
        **speeds_json(slot.ttft_s, slot.tokens_per_second),
    }


async def get_settings(request: web.Request) -> web.Response:
    """The settings in force, without secrets."""
    require_overview(request)
    return json_reply({"settings": shown_settings(request.app[CONFIG])})


def shown_settings(config: Config) -> list[dict[str, Any]]:
    """Every setting that people have, with SET in the place of each secret."""
    found: list[dict[str, Any]] = []
    for item in fields_of(config):
        spec = item.metadata.get("setting")
        if spec is None:
            continue  # not for people
        value = getattr(config, item.name)
        if not item.repr:
            value = SET if value else None
        elif spec.kind == "args":
            value = tuple(_without_secrets(value))
        elif isinstance(value, Path):
            value = str(value)
        elif not isinstance(value, str | int | float | tuple | None):
            value = str(value)
        found.append({"name": item.name, "flag": spec.flags[0], "value": value, "help": spec.help})
    return found


def _without_secrets(words: Iterable[str]) -> Iterator[str]:
    """llama-server's flags and values, SET in the place of each secret."""
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = not is_value and canonical(name) in SECRET_FLAGS
        if is_value:
            yield SET
        else:
            yield f"{name}={SET}" if is_secret and equals else word
        is_value = is_secret and not equals
