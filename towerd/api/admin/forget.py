"""/towerd/v1/forget: delete conversations, and destroy what is needed to read them."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.access import require_admin
from towerd.api.http.body import read_object
from towerd.api.http.keys import service_of
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest, NotFound, TowerdError
from towerd.search.search import Search
from towerd.store import Store
from towerd.store.files.directory import DAY_S
from towerd.store.maintenance.forget import (
    ForgettableSession,
    Selection,
    forget_rest,
    sessions_of,
    unpin,
)

_HEX = re.compile("[0-9a-f]{64}")
FIELDS = ("sessions", "tenant", "older_than_days", "dry_run")


async def post_forget(request: web.Request) -> web.Response:
    """Delete `sessions` (`id`, `scope` and `tokenizer` of each), or the conversations of `tenant`, those unused for
    `older_than_days`, or those of one tenant that were; without any none. Then overwrite what is left of all that was deleted, now or before, and in an encrypted store
    destroy the keys that it was sealed with. With `dry_run` only say what would be deleted."""
    require_admin(request)
    body = await read_object(request)
    chosen, is_dry = _chosen(body)
    service = service_of(request)
    store, search = service.store, service.search
    found = _named(body, search.reader.own_tokenizer)
    if chosen is not None:
        found += await asyncio.to_thread(sessions_of, store.state, chosen)
    said: dict[str, Any] = {
        "sessions": len(found),
        "tokens": sum(session.n_tokens for session in found),
        "is_encrypted": store.vault is not None,
    }
    own = search.reader.own_tokenizer
    if is_dry:
        return json_reply({"would_forget": said})
    for session in found:
        await asyncio.to_thread(_delete, store, session, own)
        await asyncio.to_thread(search.deleted, session.id)
    if chosen is not None:
        said |= await asyncio.to_thread(forget_rest, store.state, store.bases, chosen)
    report = await asyncio.to_thread(_destroy, store, search)
    with suppress(TowerdError):  # a store without a daemon
        said["shared"] = service.roaming is not None
    return json_reply({"forgot": said | report})


def _chosen(body: dict[str, Any]) -> tuple[Selection | None, bool]:
    """What is to be forgotten, None for nothing more; and whether it is only asked for. Raises InvalidRequest."""
    for name in body:
        if name not in FIELDS:
            raise InvalidRequest(f"Field '{name}': is not known here")
    tenant, days = fields.string(body, "tenant", ""), body.get("older_than_days")
    age_days = None if days is None else fields.number("older_than_days", days)
    if age_days is not None and age_days < 0:
        raise InvalidRequest("Field 'older_than_days': must not be negative")
    is_dry = fields.boolean(body, "dry_run", False)
    if not tenant and age_days is None:
        return None, is_dry
    before = None if age_days is None else time.time() - age_days * DAY_S
    return Selection(tenant or None, before), is_dry


def _named(body: dict[str, Any], own_tokenizer: str) -> list[ForgettableSession]:
    """The sessions that a request names. Raises InvalidRequest."""
    found = []
    given = body.get("sessions") or []
    for each in given if isinstance(given, list) else [None]:
        if not isinstance(each, dict):
            raise InvalidRequest("Field 'sessions': must be a list of objects")
        id, scope = fields.string(each, "id", ""), fields.string(each, "scope", "")
        tokenizer = fields.string(each, "tokenizer", "") or own_tokenizer
        if not id or not scope or not _HEX.fullmatch(tokenizer):
            raise InvalidRequest(
                "Field 'sessions': each needs an id, a scope and the tokenizer's digest"
            )
        found.append(ForgettableSession(id, scope, tokenizer, 0, is_pinned=True))
    return found


def _delete(store: Store, session: ForgettableSession, own_tokenizer: str) -> None:
    if session.is_pinned:
        unpin(store.state, session)
    with suppress(NotFound):  # deleted meanwhile
        if session.tokenizer == own_tokenizer:
            store.delete_session(session.id, session.scope)
        else:
            store.foreign.delete(session.id, session.scope, session.tokenizer)


def _destroy(store: Store, search: Search) -> dict[str, Any]:
    report = store.gc(quarantine_days=0.0)
    search.erase()
    if store.vault is None:
        return {**asdict(report), "keys_destroyed": False}
    from towerd.store.maintenance.renewal import keys_renewed

    with keys_renewed(store.state, store.vault):
        search.renew_key()
    return {**asdict(report), "keys_destroyed": True}
