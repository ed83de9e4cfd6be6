"""/towerd/v1/sessions: the conversations of the caller's tenant; /towerd/v1/search: where words were said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.access import visible_scope
from towerd.api.http.body import read_object
from towerd.api.http.fields import flag, integer_query
from towerd.api.http.keys import LIMITS, TENANT, service_of
from towerd.api.http.numbers import numbers_of
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest, NotFound, ThawError, TowerdError
from towerd.store import SessionInfo, Store, TurnInfo
from towerd.store.maintenance.holding import freed_by_deleting, layer_bytes
from towerd.store.maintenance.model_names import session_models
from towerd.store.maintenance.space import stored_rows
from towerd.store.sessions.foreign import ForeignSession

TURN_NUMBERS = ("id", "parent", "prompt_node", "reply_node")
"""Of a turn: its own, that of the turn before it, and those of its segments."""
T = TypeVar("T")
U = TypeVar("U")
IDLE_S_MAX = 10**10
ROW_MAX = (1 << 63) - 1
QUERY_CHARS_MAX = 1000


async def list_sessions(request: web.Request) -> web.Response:
    """The sessions, most recently used first; with `?begins=` those whose generated id begins so; with
    `?idle_s=` those that can be frozen and were unused for that long, least recently used first; with
    `?coded_after=` the row, name and scope of those that have a coded form, from that row on."""
    store = service_of(request).store
    limit = integer_query(request, "limit", 100, 1, request.app[LIMITS].page_max)
    scope = visible_scope(request)
    if "coded_after" in request.query:
        numbers = await numbers_of(request)
        after = numbers.real(integer_query(request, "coded_after", 0, 0, ROW_MAX))
        coded = await asyncio.to_thread(store.cold.coded, after, limit, scope)
        rows = [numbers.with_shown(asdict(session), ("pk",)) for session in coded]
        return json_reply({"sessions": rows})
    if "begins" in request.query:
        begins = store.sessions_beginning
        sessions = await asyncio.to_thread(begins, request.query["begins"], scope, limit)
    elif "idle_s" in request.query:
        before = time.time() - integer_query(request, "idle_s", 0, 0, IDLE_S_MAX)
        sessions = await asyncio.to_thread(store.cold.idle, before, limit, scope)
    else:
        sessions = await asyncio.to_thread(_sessions, store, scope, limit)
    return json_reply({"sessions": await sessions_json(request, sessions)})


async def get_search(request: web.Request) -> web.Response:
    """The conversations with a turn in which all words of `?q=` occur, the best match first, with
    the words around them."""
    search = service_of(request).search
    typed = request.query.get("q", "")
    if len(typed) > QUERY_CHARS_MAX:
        raise InvalidRequest(f"Query parameter 'q' may have at most {QUERY_CHARS_MAX} characters")
    limit = integer_query(request, "limit", 20, 1, request.app[LIMITS].page_max)
    found = await asyncio.to_thread(search.find, typed, visible_scope(request), limit)
    listed = await sessions_json(request, [info for _, info in found])
    numbers = await numbers_of(request)
    results: list[dict[str, Any]] = [
        {
            "session": session,
            "turn": numbers.shown(hit.turn),
            "said": hit.said,
            "snippet": hit.snippet,
        }
        for session, (hit, _) in zip(listed, found, strict=True)
    ]
    return json_reply({"query": typed, "results": results})


async def sessions_json(request: web.Request, infos: Sequence[SessionInfo]) -> list[dict[str, Any]]:
    """Sessions as they are listed; one that was given no title has its first question for one. With
    `?footprint=1` each says what it takes, with `?cost=1` in which tier."""
    titles = [info.title for info in infos]
    if not all(titles):
        titles = await asyncio.to_thread(service_of(request).search.titles, infos)
    numbers, state = await numbers_of(request), service_of(request).store.state
    models = await asyncio.to_thread(session_models, state, infos)
    found = [
        numbers.with_shown(asdict(info), ("leaf",)) | {"title": title, "model": model}
        for info, title, model in zip(infos, titles, models, strict=True)
    ]
    if flag(request, "footprint"):
        footprints, sees_all = service_of(request).store.footprints, request[TENANT].sees_all
        taken = await asyncio.to_thread(footprints, infos, with_public=sees_all)
        for session, each in zip(found, taken, strict=True):
            session["footprint"] = None if each is None else each.to_json()
    if flag(request, "cost"):
        costs = await asyncio.to_thread(service_of(request).store.tier_costs, infos)
        for session, cost in zip(found, costs, strict=True):
            session["cost"] = None if cost is None else asdict(cost)
    return found


async def _session_json(request: web.Request, info: SessionInfo) -> dict[str, Any]:
    return (await sessions_json(request, [info]))[0]


def _sessions(store: Store, scope: str | None, limit: int) -> list[SessionInfo]:
    """The sessions of the served model's tokenizer and of others, the last used first."""
    own, foreign = store.sessions(scope, limit), store.foreign.listing(scope, limit)
    return sorted([*own, *foreign], key=lambda info: info.updated, reverse=True)[:limit]


def in_either(
    request: web.Request,
    own: Callable[[str, str | None], T],
    foreign: Callable[[str, str | None, str], U],
) -> Callable[[], T | U]:
    """What is asked of a session, for a thread: of one of the served model's tokenizer, or else of one of
    another, or at once of the one of `?tokenizer=`. The call raises NotFound."""
    name, scope = request.match_info["id"], visible_scope(request)
    tokenizer = request.query.get("tokenizer", "")

    def work() -> T | U:
        if tokenizer == served_tokenizer(request):
            return own(name, scope)
        if not tokenizer:
            with suppress(NotFound):
                return own(name, scope)
        return foreign(name, scope, tokenizer)

    return work


def served_tokenizer(request: web.Request) -> str:
    """The hex digest of the served model's tokenizer."""
    return service_of(request).search.reader.own_tokenizer


async def get_session(request: web.Request) -> web.Response:
    """One session with its turns; `?text=1` adds the text of its current branch, `?messages=1` who
    said what, `?kept=1` what is live of it, `?cost=1` what it takes in each tier, `?layers=1` by layer, and what
    it alone needs. A frozen session is decoded for that, and stays frozen."""
    service = service_of(request)
    store, name = service.store, request.match_info["id"]
    found = await asyncio.to_thread(in_either(request, store.session, store.foreign.session))
    if isinstance(found, ForeignSession):
        return await _get_foreign(request, name, found)
    info = found
    turns = await asyncio.to_thread(store.turns, name, info.scope)
    rows = await asyncio.to_thread(stored_rows, store.state, turns)
    out: dict[str, Any] = {
        "session": await _session_json(request, info),
        "turns": await _turns_json(request, turns),
        "rows": [asdict(each) for each in rows],
    }
    if "cost" in out["session"]:
        out["cost"] = out["session"].pop("cost")
    if flag(request, "layers"):
        layers = await asyncio.to_thread(layer_bytes, store.state, info)
        sees_all = request[TENANT].sees_all
        freed = await asyncio.to_thread(freed_by_deleting, store.state, info, with_public=sees_all)
        out |= {"layers": [asdict(each) for each in layers], "freed": asdict(freed)}
    if flag(request, "messages"):
        out["messages"] = await _messages(request, info)
    if flag(request, "kept"):
        out["kept"] = None if info.cold_bytes else await _kept(request, name, info.scope)
    if flag(request, "text") or flag(request, "ids"):
        await _add_tokens(request, out, name, info.scope)
    return json_reply(out)


async def _turns_json(request: web.Request, turns: Sequence[TurnInfo]) -> list[dict[str, Any]]:
    numbers = await numbers_of(request)
    return [numbers.with_shown(asdict(turn), TURN_NUMBERS) for turn in turns]


async def _add_tokens(request: web.Request, out: dict[str, Any], name: str, scope: str) -> None:
    """`ids` and `text` of the current branch. A frozen session whose ids cannot be had is read as
    text all the same."""
    service = service_of(request)
    detokenize = service.engine.detokenize if flag(request, "text") else None
    try:
        ids = await service.cold.session_ids(name, scope)
    except ThawError:
        if flag(request, "ids"):
            raise
        out["text"] = await service.cold.read_text(service.search.reader.text, name, scope)
        return
    if flag(request, "ids"):
        out["ids"] = ids.tolist()
    if detokenize is not None:
        out["text"] = (await detokenize(ids)).decode("utf-8", "replace")


async def _messages(request: web.Request, info: SessionInfo) -> list[dict[str, Any]]:
    """Who said what on the branch that ends with `?turn=`, by default the current one."""
    reader = service_of(request).search.reader
    numbers = await numbers_of(request)
    turn = numbers.real(integer_query(request, "turn", 0, 0, ROW_MAX)) or None
    return [asdict(each) for each in await asyncio.to_thread(reader.branch, info, turn)]


async def _get_foreign(request: web.Request, name: str, found: ForeignSession) -> web.Response:
    """A session of another tokenizer than the served model's: nothing of it can be live."""
    foreign, info = service_of(request).store.foreign, found.info
    which = name, info.scope, info.tokenizer
    out: dict[str, Any] = {
        "session": await _session_json(request, info),
        "turns": await _turns_json(request, found.turns),
        "rows": [],
    }
    if flag(request, "cost"):
        out["cost"] = None
    if flag(request, "layers"):
        out |= {"layers": [], "freed": None}
    if flag(request, "messages"):
        out["messages"] = await _messages(request, info)
    if flag(request, "kept"):
        out["kept"] = None
    if flag(request, "ids"):
        ids, _ = await asyncio.to_thread(foreign.session_ids, *which)
        out["ids"] = ids.tolist()
    if flag(request, "text"):
        service = service_of(request)
        out["text"] = await service.cold.read_text(service.search.reader.foreign_text, *which)
    return json_reply(out)


async def _kept(request: web.Request, name: str, scope: str) -> dict[str, Any] | None:
    """What is live of a session that is not frozen, if its chat has a budget."""
    service = service_of(request)
    ids = await asyncio.to_thread(service.store.session_ids, name, scope)
    kept = await service.engine.kept(ids, scope)
    return None if kept is None else asdict(kept)


async def patch_session(request: web.Request) -> web.Response:
    """Set a session's title."""
    store = service_of(request).store
    body = await read_object(request)
    if body.get("title") is None:
        raise InvalidRequest("Field 'title' is required")
    title = fields.string(body, "title", "")
    rename = in_either(
        request,
        lambda id, scope: store.rename_session(id, title, scope),
        lambda id, scope, tokenizer: store.foreign.rename(id, title, scope, tokenizer),
    )
    info = await asyncio.to_thread(rename)
    return json_reply({"session": await _session_json(request, info)})


async def own_session(request: web.Request) -> SessionInfo:
    """The session in the path, which is to be coded or decoded. Raises NotFound, or InvalidRequest if
    that takes another model than the served one."""
    store, name = service_of(request).store, request.match_info["id"]
    scope = visible_scope(request)
    try:
        return await asyncio.to_thread(store.session, name, scope)
    except NotFound:
        await asyncio.to_thread(store.foreign.session, name, scope)
    raise InvalidRequest(
        f"Session {name!r} has another tokenizer than the served model: it can be read and "
        "exported here, and frozen, thawed or recoded where its model is served."
    )


async def post_freeze(request: web.Request) -> web.Response:
    """Encode a session's tokens, and release them and the rows that no other session needs."""
    service, found = service_of(request), await own_session(request)
    froze = await service.cold.freeze(found.id, found.scope)
    info = await asyncio.to_thread(service.store.session, found.id, found.scope)
    return json_reply({"session": await _session_json(request, info), "changed": froze is not None})


async def post_thaw(request: web.Request) -> web.Response:
    """Warm a session up: decode its tokens if it is frozen, and make its rows live, evaluating what
    has none, while the engine is idle; with `{"ahead": false}` when they are requested."""
    service = service_of(request)
    ahead = fields.boolean(await read_object(request), "ahead", True)
    found = await own_session(request)
    was_frozen = await service.cold.thaw(found.id, found.scope)
    if ahead and service.cold.ahead is not None:
        service.cold.ahead.evaluate(found.id, found.scope)
    info = await asyncio.to_thread(service.store.session, found.id, found.scope)
    return json_reply({"session": await _session_json(request, info), "changed": was_frozen})


async def delete_session(request: web.Request) -> web.Response:
    """Delete a session. The next gc removes its segments unless another session needs them. `shared`: a copy in the
    shared tier, if there is one, stays."""
    store, name = service_of(request).store, request.match_info["id"]
    await asyncio.to_thread(in_either(request, store.delete_session, store.foreign.delete))
    await asyncio.to_thread(service_of(request).search.deleted, name)
    reply: dict[str, object] = {"deleted": name}
    with suppress(TowerdError):  # a store without a daemon
        reply |= {} if service_of(request).roaming is None else {"shared": True}
    return json_reply(reply)
