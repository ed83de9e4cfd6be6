"""POST /towerd/v1/sessions/{id}/chat: a conversation is continued, from any message of a user.

What is continued are the tokens that the store has, not what their text would be rendered and tokenized as: a
template drops a model's earlier reasoning, and a client's may differ. Only the new message is rendered, behind a
short chat of which it is the last one, and what it was rendered behind is replaced by those tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from aiohttp import web

from towerd.api.admin.sessions import ROW_MAX, in_either
from towerd.api.http import fields
from towerd.api.http.body import decode_object, read_bytes, release_body
from towerd.api.http.fields import Body
from towerd.api.http.hints import hints_of
from towerd.api.http.keys import CONFIG, TENANT, service_of
from towerd.api.http.numbers import numbers_of
from towerd.api.http.reply import encode
from towerd.api.http.request_log import title_for
from towerd.api.llama.completion import answer
from towerd.api.llama.task import Task, parse_task
from towerd.errors import Forbidden, InvalidRequest
from towerd.model.speakers import message_starts
from towerd.search.reading import ReadBranch
from towerd.sessions.session_media import SessionMedia
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.sessions.foreign import ForeignSession
from towerd.store.tree.scope import tenant_of
from towerd.tokens import Ids

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.wire import Model

_OWN_FIELDS = ("turn", "at", "message", "messages", "prompt")
_TEXTS = ("fine", "good")
"""Of messages that are rendered to see what stands behind them."""
_THINKING: tuple[Body, ...] = (
    {},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": True}},
)


async def post_chat(request: web.Request) -> web.StreamResponse:
    """Continue a conversation: `message` behind its tokens up to `at`, where a message of the branch of `turn`
    begins, or else behind all of them; without a `message`, another reply to what that turn's was to. Otherwise
    a chat completion."""
    service = service_of(request)
    began = service.store, service.sessions.recorder.watch_deletions()
    task, title = await _continuing(request)
    task.began = began  # a deletion from here on: its tokens are read before the task runs
    release_body(request)
    return await answer(request, task, title)


async def _continuing(request: web.Request) -> tuple[Task, str]:
    """The task that continues a conversation, and its title for the log; nothing else of the body stays. Raises
    TowerdError."""
    service, engine = service_of(request), service_of(request).engine
    either = in_either(request, service.store.session, service.store.foreign.session)
    info = await asyncio.to_thread(either)
    if isinstance(info, ForeignSession):
        raise InvalidRequest(
            f"Session {info.info.id!r} has another tokenizer than the served model: continue it where its "
            "model is served"
        )
    if tenant_of(info.scope) != request[TENANT].scope:
        raise Forbidden("This conversation is another tenant's: continue it with that tenant's key")
    data, numbers = await read_bytes(request), await numbers_of(request)
    body, n_bytes = await decode_object(request, data), len(data)
    del data
    turn = numbers.real(fields.integer_in(body, ("turn",), 0, 0, ROW_MAX)) or None
    reader, hints = service.search.reader, hints_of(request)
    branch = await asyncio.to_thread(reader.chat, info, turn)
    if not branch.turn:
        raise InvalidRequest(
            f"The tokens of session {info.id!r} cannot be recovered here: it can only be read"
        )
    at = fields.integer_in(body, ("at",), len(branch.ids), 0, len(branch.ids))
    message = _message(body)
    given = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    asked = ContinuedChat(branch, reader.own_vocabulary(), at, message, given)
    n_bytes = max(n_bytes, len(branch.ids))  # its tools are rendered as well
    made, continued = await engine.wire.call(n_bytes, asked.made, engine.wire.model)
    data = await asyncio.to_thread(encode, made)
    shown = await asyncio.to_thread(encode, {"messages": [message]} if message else {})
    title = await title_for(request, shown)
    hints = replace(hints, session=info.id)
    config = request.app[CONFIG]
    own_scope = info.scope if engine.adapters.has(info.scope) else ""
    media = service.store.media
    row = await asyncio.to_thread(media.session, info.id, info.scope)
    kept = None if row is None else SessionMedia(media, row, engine.wire.model).find
    task = await parse_task(
        "chat",
        data,
        request[TENANT],
        hints,
        engine,
        config,
        continued=continued,
        own_scope=own_scope,
        kept_media=kept,
    )
    return task, title


def _message(body: Body) -> Body | None:
    """The message that a body sends. Raises InvalidRequest."""
    message = body.get("message")
    if message is None:
        if fields.present(body, "at"):
            raise InvalidRequest("Field 'message' is required if 'at' is given")
        return None
    if not isinstance(message, dict) or message.get("role", "user") != "user":
        raise InvalidRequest("Field 'message' must be a user's message")
    return {"role": "user", **message}


@dataclass(frozen=True, slots=True)
class ContinuedChat:
    """A message, or none, behind the first `at` tokens of a branch."""

    branch: ReadBranch
    vocabulary: KeptVocabulary
    at: int
    message: Body | None
    given: Body
    """The other fields of a chat completion."""

    def made(self, model: Model) -> tuple[Body, tuple[Ids, int] | None]:
        """The body of a chat completion, and what it continues: see `towerd.wire.Request`. Raises InvalidRequest,
        WireError."""
        return self._again(model) if self.message is None else self._behind(model, self.message)

    def _behind(self, model: Model, message: Body) -> tuple[Body, tuple[Ids, int] | None]:
        messages, n_all = self.branch.messages, len(self.branch.ids)
        if self.at < n_all and not self.branch.is_named:
            raise InvalidRequest(
                "Field 'at': no control tokens say where messages of this conversation begin: it can only continue at its end"
            )
        if self.at < n_all and self.at not in [each.at for each in messages if each.role == "user"]:
            raise InvalidRequest("Field 'at' must be where a user's message begins")
        before = [each.role for each in messages if each.at < self.at]
        if not before:
            return {**self.given, "messages": [message]}, None
        if all(role == "system" for role in before):
            chats: list[list[Body]] = [[_said("system", text)] for text in _TEXTS]
        else:
            chats = [[_said("user", _TEXTS[0]), _said("assistant", text)] for text in _TEXTS]
        asked = _said("user", _TEXTS[0])
        one, other = (self._ids(model, [*chat, asked]) for chat in chats)
        n, prefix = len(one) - _common_suffix(one, other), self.branch.ids[: self.at]
        if self.at < n_all and self._is_control(int(self.branch.ids[self.at])):
            n += next(
                (s.at for s in message_starts(one[n:], self.vocabulary) if s.role == "user"), 0
            )
        else:
            while len(prefix) and self._is_control(int(prefix[-1])):
                prefix = prefix[:-1]  # the end of a reply, which is rendered as well
        return {**self.given, "messages": [*chats[0], message]}, (prefix, n)

    def _again(self, model: Model) -> tuple[Body, tuple[Ids, int] | None]:
        """Another reply to the same prompt. One that ends otherwise than this model's do is not parsed."""
        prompt, asked = self.branch.ids[: self.branch.n_prompt], _said("user", _TEXTS[0])
        for more in _THINKING:
            fields = {**more, **self.given}
            one, other = (self._ids(model, [_said("user", text)], fields) for text in _TEXTS)
            n = _common_suffix(one, other)
            if n and np.array_equal(prompt[-n:], one[-n:]):
                return {**fields, "messages": [asked]}, (prompt, len(one))
        one = self._ids(model, [asked])
        return {**self.given, "reasoning_format": "none", "messages": [asked]}, (prompt, len(one))

    def _ids(self, model: Model, messages: Sequence[Body], fields: Body | None = None) -> Ids:
        """A chat as it is rendered and tokenized."""
        from towerd.wire import Request

        given = self.given if fields is None else fields
        return Request(model, "chat", encode({**given, "messages": messages})).prompts[0]

    def _is_control(self, id: int) -> bool:
        names = self.vocabulary.names
        return 0 <= id < len(names) and bool(names[id])


def _said(role: str, content: str) -> Body:
    return {"role": role, "content": content}


def _common_suffix(one: Ids, other: Ids) -> int:
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[len(one) - n :] != other[len(other) - n :])
    return n if not len(differ) else n - 1 - int(differ[-1])
