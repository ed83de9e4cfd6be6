"""/v1/conversations: items that responses take for their context and add to."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from towerd.api.http.body import read_object
from towerd.api.http.keys import TENANT, responses_of
from towerd.api.http.reply import encode, json_reply, raw_reply
from towerd.api.responses.items import ItemQuery, checked_items, checked_metadata, listed
from towerd.errors import InvalidRequest
from towerd.store.sessions.conversations import Conversation, ConversationTable


async def create_conversation(request: web.Request) -> web.Response:
    """A new conversation, with `items` and `metadata` if these are given."""
    body = await read_object(request)
    metadata = _metadata(body)

    def work() -> Conversation:
        items = checked_items(body.get("items"), is_needed=False)
        return _table(request).create(request[TENANT].scope, metadata, items)

    return json_reply(_shown(await asyncio.to_thread(work)))


async def get_conversation(request: web.Request) -> web.Response:
    """A conversation without its items."""
    return json_reply(_shown(await asyncio.to_thread(_table(request).get, *_asked(request))))


async def update_conversation(request: web.Request) -> web.Response:
    """Set a conversation's `metadata`."""
    body = await read_object(request)
    if "metadata" not in body:
        raise InvalidRequest("Field 'metadata' is required", param="metadata")
    metadata = _metadata(body)
    update = _table(request).set_metadata
    return json_reply(_shown(await asyncio.to_thread(update, *_asked(request), metadata)))


async def delete_conversation(request: web.Request) -> web.Response:
    """Delete a conversation and its items."""
    scope, name = _asked(request)
    await asyncio.to_thread(_table(request).delete, scope, name)
    return json_reply({"id": name, "object": "conversation.deleted", "deleted": True})


async def list_items(request: web.Request) -> web.Response:
    """The items of a conversation, a page at a time."""
    query, table = ItemQuery.of(request), _table(request)

    def work() -> bytes:
        which = query.after, query.limit
        items, has_more = table.page(
            *_asked(request), *which, oldest_first=query.oldest_first
        )  # fmt: skip
        return listed(items, has_more=has_more)

    return raw_reply(await asyncio.to_thread(work))


async def create_items(request: web.Request) -> web.Response:
    """Add items to the end of a conversation."""
    body = await read_object(request)

    def work() -> bytes:
        items = checked_items(body.get("items"), is_needed=True)
        _table(request).add_items(*_asked(request), items)
        return listed([item.body for item in items])

    return raw_reply(await asyncio.to_thread(work))


async def get_item(request: web.Request) -> web.Response:
    """One item of a conversation."""
    item = request.match_info["item"]
    return raw_reply(await asyncio.to_thread(_table(request).item, *_asked(request), item))


async def delete_item(request: web.Request) -> web.Response:
    """Delete an item; answers with its conversation."""
    item = request.match_info["item"]
    delete = _table(request).delete_item
    return json_reply(_shown(await asyncio.to_thread(delete, *_asked(request), item)))


def _table(request: web.Request) -> ConversationTable:
    return responses_of(request).conversations


def _asked(request: web.Request) -> tuple[str, str]:
    """The tenant, and the conversation that it names."""
    return request[TENANT].scope, request.match_info["id"]


def _metadata(body: dict[str, Any]) -> str:
    return encode(checked_metadata(body.get("metadata"))).decode()


def _shown(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.name,
        "object": "conversation",
        "created_at": int(conversation.created),
        "metadata": msgspec.Raw(conversation.metadata.encode()),
    }
