"""POST /slots/{id_slot}: save, restore and erase by name, as llama-server has them, over the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.access import own_scope
from towerd.api.http.body import read_object
from towerd.api.http.keys import CONFIG, TENANT, service_of
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest, NotSupported
from towerd.sessions.slot_saves import SlotBook, file_of, restore, save
from towerd.store.tree.scope import tenant_of

BOOK: web.AppKey[SlotBook] = web.AppKey("slot_book")
_DIGITS_MAX = 9


async def post_slot(request: web.Request) -> web.Response:
    """Save what a slot had last to `filename`, restore a slot from it, or leave a slot empty."""
    if request.app[CONFIG].slot_save_path is None:
        raise NotSupported(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    text = request.match_info["id_slot"]
    n_slots = service_of(request).engine.n_slots
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX):
        raise InvalidRequest("Invalid slot ID")
    if (slot := int(text)) >= n_slots:
        raise InvalidRequest("Invalid slot ID")
    actions = {"save": _save, "restore": _restore, "erase": _erase}
    action = actions.get(request.query.get("action", ""))
    if action is None:
        raise InvalidRequest("Invalid action")
    return await action(request, slot)


async def _save(request: web.Request, slot: int) -> web.Response:
    service, name = service_of(request), await _file_name(request)
    chat = request.app[BOOK].of(request[TENANT].scope, slot, service.store)
    if chat is None:
        raise InvalidRequest("This slot is empty: no request was answered in it")
    path = file_of(_folder(request), tenant_of(chat.scope), name)
    done = await save(service.engine, service.tiers, service.sessions, chat, path)
    return json_reply(
        {
            "id_slot": slot,
            "filename": name,
            "n_saved": done.n_tokens,
            "n_written": done.n_bytes,
            "timings": {"save_ms": done.ms},
        }
    )


async def _restore(request: web.Request, slot: int) -> web.Response:
    service, name = service_of(request), await _file_name(request)
    path = file_of(_folder(request), request[TENANT].scope, name)
    scope = own_scope(request)
    done, chat = await restore(service.engine, service.sessions, service.store, scope, path)
    request.app[BOOK].note(slot, chat)
    return json_reply(
        {
            "id_slot": slot,
            "filename": name,
            "n_restored": done.n_tokens,
            "n_read": done.n_bytes,
            "timings": {"restore_ms": done.ms},
        }
    )


async def _erase(request: web.Request, slot: int) -> web.Response:
    book, tenant = request.app[BOOK], request[TENANT].scope
    chat = book.of(tenant, slot, service_of(request).store)
    book.forget(tenant, slot)
    return json_reply({"id_slot": slot, "n_erased": 0 if chat is None else chat.n})


def _folder(request: web.Request) -> Path:
    folder = request.app[CONFIG].slot_save_path
    assert folder is not None
    return folder


async def _file_name(request: web.Request) -> str:
    from towerd.wire import is_file_name  # llama.cpp is loaded with the model

    name = fields.string(await read_object(request), "filename", "")
    if not await asyncio.to_thread(is_file_name, name):
        raise InvalidRequest("Invalid filename")
    return name
