"""/towerd/v1/requests and /towerd/v1/settings: what runs, what ran, and how the daemon was set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from aiohttp import web

from towerd.api.admin.sessions import served_tokenizer
from towerd.api.http.access import require_overview, slot_numbers, visible_scope
from towerd.api.http.fields import integer_query
from towerd.api.http.keys import CONFIG, LIMITS, service_of
from towerd.api.http.recent_requests import RECENT, REQUESTS_MAX, speeds_json
from towerd.api.http.reply import json_reply
from towerd.engine.base import SlotView
from towerd.settings.config import Config
from towerd.settings.llama_flags import canonical
from towerd.store.tree.scope import tenant_of

SET = "(set)"
"""Stands for the value of a secret."""
SECRET_FLAGS = frozenset(
    "-hft --hf-token --api-key --mcp-servers-json --model-url -mu --mmproj-url -mmu".split()
)
"""llama-server's flags whose values are keys, or hold keys (links may be signed)."""


async def get_requests(request: web.Request) -> web.Response:
    """The running requests of the caller's tenant, and those that ended after `?since=`, the newest
    first."""
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
    finished = request.app[RECENT].since(since, scope, limit)
    tokenizer = served_tokenizer(request)
    return json_reply({"running": running, "finished": finished, "tokenizer": tokenizer})


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
