"""PendingResponse: what a request to /v1/responses continues, and where its response is kept.

What it continues is put before its `input`, so that everything behind this sees the request of a client
that sends the whole conversation each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from aiohttp import web

from towerd.api.http.body import BODIES, decode_json
from towerd.api.http.fields import wrong_type
from towerd.api.http.keys import CONFIG, LIMITS, TENANT, service_of
from towerd.api.http.reply import encode
from towerd.api.responses.items import checked_metadata, named_items
from towerd.api.responses.streamed import LOOK_S_MAX, STREAMED, StreamedResponses
from towerd.errors import InvalidRequest, NotFound, NotSupported, TooLarge
from towerd.store.sessions.conversations import ContextItem, ResponseContext
from towerd.store.sessions.responses import NewResponse

if TYPE_CHECKING:
    from towerd.engine.base import Finish
    from towerd.store import Store
    from towerd.store.sessions.deletions import DeletionWatch

log = logging.getLogger(__name__)

RawFields: TypeAlias = Mapping[str, msgspec.Raw]
NOT_FOUND = "previous_response_not_found"
CONTEXT_FIELDS = ("previous_response_id", "conversation")
_raws = msgspec.json.Decoder(list[msgspec.Raw])


class _MadeResponse(msgspec.Struct, frozen=True):
    id: str
    output: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class PendingResponse:
    """A request whose response is not there yet."""

    shown: bytes
    """JSON object: fields of the response that come from the request."""
    scope: str
    """The tenant."""
    is_kept: bool
    context: ResponseContext
    """Without its items."""
    input: Sequence[ContextItem]
    """Its own items; none if they are not kept."""
    store: Store
    conversation: str = ""
    """The id of the one that it is said in; empty: none."""
    session: int | None = None
    """The row of its session, if it has no turn."""

    @classmethod
    async def of(cls, request: web.Request, body: bytes) -> tuple[PendingResponse | None, bytes]:
        """That of a request with this body, and the body with all items that it continues in `input`;
        None if the body is one that the parser refuses. Raises InvalidRequest, NotFound and TooLarge."""
        store, scope = service_of(request).store, request[TENANT].scope
        is_small = len(body) <= request.app[LIMITS].inline_bytes_max
        asked = _asked(body) if is_small else await asyncio.to_thread(_asked, body)
        if asked is None:
            return None, body
        own = asked.shown, scope, asked.is_kept
        if not asked.name:
            return cls(*own, ResponseContext(), asked.input, store), body
        is_alone, streamed = request.app[CONFIG].catalog_fd is None, request.app[STREAMED]
        look_s = 0.0 if is_alone else LOOK_S_MAX
        context = await asked.found_context(store, scope, streamed, look_s=look_s)
        n_bytes = sum(map(len, context.items))
        bytes_max = request.app[CONFIG].request_bytes_max
        if n_bytes + len(body) > bytes_max:
            raise TooLarge(f"The conversation exceeds the limit of a request, {bytes_max} bytes")
        request.app[BODIES].hold(request, n_bytes)
        whole = await asyncio.to_thread(asked.with_context, context)
        conversation = asked.name if asked.field == "conversation" else ""
        return cls(*own, replace(context, items=()), asked.input, store, conversation), whole

    @property
    def is_to_be_kept(self) -> bool:
        """Whether the response, or its items in a conversation, are kept."""
        return self.is_kept or bool(self.conversation)

    def hold(self, request: web.Request) -> None:
        """Count what is remembered of the body of a request among the bodies, until the request ends."""
        request.app[BODIES].hold(request, sum(len(item.body) for item in self.input))

    async def without_tokens(self, named: str | None, scope: str) -> PendingResponse:
        """The same of an answer without tokens, which is no turn of a session: it is kept with the one that
        its client named, or that of what it continues, so that it is deleted with it, and else not kept."""
        if not self.is_kept:
            return self
        asked = self.context, named, scope
        session = await asyncio.to_thread(self.store.session_of_context, *asked)
        return replace(self, is_kept=session is not None, session=session)

    async def answered(
        self, response: bytes, finish: Finish, scope: str, since: DeletionWatch | None
    ) -> None:
        """Keep the response, and add it to its conversation, durably. scope: of its turn; since: that of its
        turn. Raises DiskFull or another StoreError."""
        if not self.is_to_be_kept:
            return
        if finish.ids and not finish.session:
            return  # it was deleted meanwhile
        if not await asyncio.to_thread(self._keep, response, finish.session, scope, since):
            log.info("a response was not kept: what it continues was deleted while it was answered")

    def _keep(self, response: bytes, session: str, scope: str, since: DeletionWatch | None) -> bool:
        made = msgspec.json.decode(response, type=_MadeResponse)
        output = named_items(map(bytes, made.output))
        body = response if self.is_kept else b""
        new = NewResponse(self.scope, made.id, self.context, self.input, output, body)
        if not session:
            return self.store.responses.add(new, self.session)
        return self.store.keep_response(new, session, scope, since)


@dataclass(frozen=True, slots=True)
class _AskedContext:
    """What a body asks for."""

    fields: RawFields
    """All of the body's."""
    field: str
    name: str
    """The id of what it continues; empty: nothing."""
    is_kept: bool
    shown: bytes
    input: Sequence[ContextItem]

    @classmethod
    def of(cls, fields: RawFields) -> _AskedContext:
        """Raises InvalidRequest."""
        previous, conversation = (
            _name_of(field, _value(fields, field)) for field in CONTEXT_FIELDS
        )
        if previous and conversation:
            raise InvalidRequest(
                "Fields 'previous_response_id' and 'conversation' exclude each other",
                param="previous_response_id",
            )
        if _value(fields, "background") is True:
            raise NotSupported(
                "A response is made while its client waits: send it without 'background'",
                param="background",
            )
        stored = _value(fields, "store")
        if not isinstance(stored, bool | None):
            raise wrong_type("store", "boolean", stored)
        is_kept = stored is not False
        shown = {
            "error": None,
            "incomplete_details": None,
            "instructions": _value(fields, "instructions"),
            "metadata": checked_metadata(_value(fields, "metadata")),
            "previous_response_id": previous or None,
            "conversation": {"id": conversation} if conversation else None,
            "store": is_kept,
        }
        field = CONTEXT_FIELDS[0] if previous else CONTEXT_FIELDS[1]
        name = previous or conversation
        items = named_items(_input_items(fields) or ()) if is_kept or name else ()
        return cls(fields, field, name, is_kept, encode(shown), items)

    async def found_context(
        self, store: Store, scope: str, streamed: StreamedResponses, *, look_s: float
    ) -> ResponseContext:
        """What it continues, once that is kept. look_s: see `StreamedResponses.find`. Raises NotFound of a conversation,
        and InvalidRequest of a response that is unknown, or as `ResponseTable.context`."""
        responses = store.responses
        try:
            if self.field == "conversation":
                await streamed.wait(scope, self.name)
                return await asyncio.to_thread(responses.conversations.context, scope, self.name)
            look = partial(asyncio.to_thread, responses.context, scope, self.name)
            return await streamed.find(scope, self.name, look, look_s=look_s)
        except NotFound as error:
            if self.field == "conversation":
                raise NotFound(error.message, param=self.field) from error
            raise InvalidRequest(
                f"Previous response with id '{self.name[:100]}' not found.",
                code=NOT_FOUND,
                param=self.field,
            ) from error

    def with_context(self, context: ResponseContext) -> bytes:
        """The body without what it continues, and with all items; an input that the parser refuses stays
        as it is."""
        kept = {name: value for name, value in self.fields.items() if name not in CONTEXT_FIELDS}
        if _input_items(self.fields) is not None:
            items = b",".join((*context.items, *(item.body for item in self.input)))
            kept["input"] = msgspec.Raw(b"[" + items + b"]")
        return encode(kept)


def continues_something(body: bytes) -> bool:
    """Whether a body names a response or a conversation that it continues."""
    fields = _fields(body)
    values = [] if fields is None else [fields.get(field, b"null") for field in CONTEXT_FIELDS]
    return any(bytes(value) not in (b"null", b'""') for value in values)


def _asked(body: bytes) -> _AskedContext | None:
    """What a body asks for; None if the parser refuses it."""
    fields = _fields(body)
    try:
        return None if fields is None else _AskedContext.of(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _fields(body: bytes) -> RawFields | None:
    try:
        fields: RawFields = decode_json(body, dict[str, msgspec.Raw])
        return fields
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _value(fields: RawFields, name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None


def _name_of(field: str, value: Any) -> str:
    """The id that a field holds, alone or as that of an object; empty: none."""
    if field == "conversation" and isinstance(value, dict):
        value = value.get("id")
        if not value:
            raise InvalidRequest(
                "Field 'conversation.id' is required: a text", param="conversation"
            )
    if value is not None and not isinstance(value, str):
        raise wrong_type(field, "string", value)
    return value or ""


def _input_items(fields: RawFields) -> list[bytes] | None:
    """The items of `input`; a text is the user's message. None if the parser refuses them."""
    value = bytes(fields.get("input", b"")).strip()
    if value.startswith(b'"'):
        part = b'{"type":"input_text","text":%s}' % value
        return [b'{"type":"message","role":"user","content":[%s]}' % part]
    if not value.startswith(b"["):
        return None
    items = [bytes(item) for item in _raws.decode(value)]
    return items if all(item.startswith(b"{") for item in items) else None
