"""/towerd/v1/forget: delete conversations, and destroy what is needed to read them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeAlias

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
    rest_of,
    sessions_of,
    unpin,
)
from towerd.store.rows.collect import unneeded_ids

_HEX = re.compile("[0-9a-f]{64}")
_FORGETTING = ThreadPoolExecutor(1, "forget")
"""One at a time: each is to destroy the keys that what it deleted was sealed with."""
_HELD_S_MAX = 60.0
_HELD_PAUSE_S = 0.5
Said: TypeAlias = dict[str, Any]
FIELDS = ("sessions", "tenant", "older_than_days", "dry_run")


async def post_forget(request: web.Request) -> web.Response:
    """Delete `sessions` (`id`, `scope` and `tokenizer` of each), or the conversations of `tenant`, those unused for
    `older_than_days`, or those of one tenant that were; without any none. Then overwrite what is left of all that was
    deleted, now or before, and in an encrypted store destroy the keys that it was sealed with. With `dry_run` only say
    what would be deleted."""
    require_admin(request)
    body = await read_object(request)
    chosen, is_dry = _chosen(body)
    service = service_of(request)
    store, search = service.store, service.search
    named = _named(body, search.reader.own_tokenizer)
    if is_dry:
        return json_reply({"would_forget": await asyncio.to_thread(_said, store, named, chosen)})
    loop = asyncio.get_running_loop()
    said = await loop.run_in_executor(_FORGETTING, _forget, store, search, named, chosen)
    with suppress(TowerdError):  # a store without a daemon
        said["shared"] = service.roaming is not None
    return json_reply({"forgot": said})


def _said(store: Store, found: Sequence[ForgettableSession], chosen: Selection | None) -> Said:
    if chosen is not None:
        found = [*found, *sessions_of(store.state, chosen)]
    return {
        "sessions": len(found),
        "tokens": sum(session.n_tokens for session in found),
        "responses": 0,
        "conversations": 0,
        "is_encrypted": store.vault is not None,
        **({} if chosen is None else rest_of(store.state, chosen)),
    }


def _forget(
    store: Store, search: Search, named: Sequence[ForgettableSession], chosen: Selection | None
) -> Said:
    """In the one thread that forgets."""
    found, before = list(named), None
    if chosen is not None:
        found, before = [*found, *sessions_of(store.state, chosen)], chosen.before
    gone = [each for each in found if _delete(store, each, before, search.reader.own_tokenizer)]
    for each in gone:
        search.deleted(each.id)
    rest = {} if chosen is None else forget_rest(store.state, store.bases, chosen)
    counts: Said = {"sessions": len(gone), "tokens": sum(each.n_tokens for each in gone)}
    return counts | rest | _destroy(store, search)


def _chosen(body: dict[str, Any]) -> tuple[Selection | None, bool]:
    """What is to be forgotten, None for nothing more; and whether it is only asked for. Raises InvalidRequest."""
    for name in body:
        if name not in FIELDS:
            raise InvalidRequest(f"Field '{name}': is not known here")
    if body.get("tenant") == "":
        raise InvalidRequest("Field 'tenant': must not be empty")
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


def _delete(
    store: Store, session: ForgettableSession, before: float | None, own_tokenizer: str
) -> bool:
    """Whether it was there, and is gone; one that was used since `before` stays."""
    is_own, which = session.tokenizer == own_tokenizer, (session.id, session.scope)
    try:
        if session.is_pinned:
            unpin(store.state, session)
        with store.locked():
            if is_own:
                info = store.session(*which)
            else:
                info = store.foreign.session(*which, session.tokenizer).info
            if before is not None and info.updated >= before:
                return False
            if is_own:
                store.delete_session(*which)
            else:
                store.foreign.delete(*which, session.tokenizer)
    except NotFound:  # deleted meanwhile
        return False
    return True


def _destroy(store: Store, search: Search) -> Said:
    """Erase what is left of what was deleted. `held`: how many segments of it running requests still need."""
    reports = [store.gc(quarantine_days=0.0)]
    left, deadline = _unneeded(store), time.monotonic() + _HELD_S_MAX
    while left and time.monotonic() < deadline:
        time.sleep(_HELD_PAUSE_S)
        reports.append(store.gc(quarantine_days=0.0))
        left &= _unneeded(store)
    search.erase()
    each = [asdict(report) for report in reports]
    said: Said = {name: sum(report[name] for report in each) for name in each[0]}
    said |= {"held": len(left), "is_encrypted": store.vault is not None}
    if store.vault is None:
        return said | {"keys_destroyed": False}
    from towerd.store.maintenance.renewal import keys_renewed

    with keys_renewed(store.state, store.vault):
        search.renew_key()
    return said | {"keys_destroyed": True}


def _unneeded(store: Store) -> set[int]:
    with store.locked():
        return unneeded_ids(store.state.catalog)
