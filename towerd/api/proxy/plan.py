"""Determines what a generation request will evaluate, before it is forwarded to llama-server."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from towerd.api.http.hints import agent_of
from towerd.api.http.off_loop import by_size, count
from towerd.api.llama.live import refuse_live
from towerd.api.llama.prompts import PromptLimit, least_tokens, tokenize_prompts
from towerd.api.proxy.chat import NotText, from_messages, from_responses, has_media
from towerd.api.proxy.splice import with_fields
from towerd.api.proxy.watch import Dialect
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.slots.chat_text import ChatText, chat_text_of
from towerd.errors import ContextExceeded, NotSupported
from towerd.tokens import Ids

SPLICE_INLINE_BYTES_MAX = 256 * 1024
IDS_INLINE_MAX = 4096
CHAT_BYTES_MAX = 256 * 1024
"""Longer chats are not recognised by their messages: that would block the event loop."""


class Placement(enum.Enum):
    """How a request gets its slot."""

    KNOWN = "known"
    """Its token ids are known: stored rows are restored into a slot for it."""
    OPAQUE = "opaque"
    """Its token ids are unknown (media, fill-in-the-middle): a slot without rows of others."""
    FREE = "free"
    """It takes several slots, or cannot name one: llama-server chooses."""


@dataclass(slots=True)
class ProxyPlan:
    """A generation request and how to forward it."""

    dialect: Dialect
    body: bytes
    placement: Placement
    ids: Ids | None = None
    stream: bool = False
    compose: bool = True
    """Whether the client allows reuse of its prompt from the cache (`cache_prompt`)."""
    can_pin: bool = True
    """Whether the endpoint obeys `id_slot`."""
    sends_ids: bool = False
    """Whether the prompt is sent as token ids, instead of what the client wrote."""
    hides_ids: bool = False
    """Whether to remove `tokens` from the reply, which the client did not ask for."""
    hides_end: bool = False
    """Whether the client wants only some fields of the last part (`response_fields`), so that the
    end cannot be recognised, and the reply's ids may be missing."""
    label: str = ""
    title: str = ""
    """What the log calls it."""
    agent: str | None = None
    """The agent, identified by system prompt and tools, if the request has any."""
    fields: dict[str, Any] = field(default_factory=dict)
    chat: ChatText | None = None
    """The messages of an ordinary chat request, which may identify its slot before its tokens are
    known."""

    async def bytes_for(self, slot: int | None) -> bytes:
        """The request's body for this slot."""
        fields = dict(self.fields)
        if slot is not None and self.can_pin:
            # Rows that --cache-reuse moves to other positions differ from those of a prefill.
            fields |= {"id_slot": slot, "n_cache_reuse": 0}
        n_ids = len(self.ids) if self.ids is not None and self.sends_ids else 0
        if len(self.body) <= SPLICE_INLINE_BYTES_MAX and n_ids <= IDS_INLINE_MAX:
            return self._splice(fields)
        return await asyncio.to_thread(self._splice, fields)

    def _splice(self, fields: dict[str, Any]) -> bytes:
        if self.ids is not None and self.sends_ids:
            fields["prompt"] = self.ids.tolist()
        return with_fields(self.body, fields)


async def make_plan(
    dialect: Dialect,
    data: bytes,
    body: Mapping[str, Any],
    engine: LlamaServerEngine,
    *,
    can_pin: bool,
) -> ProxyPlan:
    """Plan the request whose body is `data`, decoded as `body`. The tokens of a chat request with
    `chat` are still to be determined by `learn`.

    Raises InvalidRequest and ContextExceeded, as llama-server would answer."""
    refuse_live(body)
    plan = ProxyPlan(
        dialect,
        data,
        Placement.KNOWN,
        stream=body.get("stream") is True,
        compose=body.get("cache_prompt") is not False,
        can_pin=can_pin,
        agent=await by_size(count([body.get("messages"), body.get("tools")]), agent_of, body),
        hides_end=bool(body.get("response_fields")),
    )
    unpinned = Placement.OPAQUE if can_pin else Placement.FREE
    if _n_choices(body) > 1:
        plan.placement = Placement.FREE
    elif body.get("lora"):
        plan.placement, plan.label = unpinned, "lora"
    elif dialect in (Dialect.NATIVE, Dialect.COMPLETION):
        await _plan_completion(plan, body, engine)
    else:
        await _plan_chat(plan, body, engine)
    check_fits(plan, engine.n_ctx)
    return plan


async def learn(plan: ProxyPlan, engine: LlamaServerEngine) -> None:
    """Determine the tokens that a chat request will be evaluated as. Raises llama-server's error if
    it refuses the request."""
    try:
        text = await engine.text_of_chat(plan.body)
    except NotSupported:
        plan.placement, plan.label = Placement.OPAQUE, "media"
    else:
        plan.ids = await _tokenized(text, engine)


async def _tokenized(text: str, engine: LlamaServerEngine) -> Ids:
    """The tokens of a chat's text. Raises ContextExceeded, at once if it is much too long."""
    least = least_tokens([text], engine.token_bytes_max)
    PromptLimit(engine.n_ctx).check([least], are_least=True)
    return await engine.tokenize(text, add_special=True, parse_special=True)


async def _plan_completion(
    plan: ProxyPlan, body: Mapping[str, Any], engine: LlamaServerEngine
) -> None:
    prompt = body.get("prompt")
    if _n_prompts(prompt) > 1:
        plan.placement = Placement.FREE
        return
    try:
        plan.ids = (await tokenize_prompts(prompt, engine, PromptLimit(engine.n_ctx), 1))[0]
    except NotSupported:  # more than text
        plan.placement, plan.label = Placement.OPAQUE, "media"
        return
    plan.sends_ids = not _is_ids(prompt)
    if plan.dialect is Dialect.NATIVE and not plan.stream and not body.get("return_tokens"):
        plan.fields["return_tokens"] = True
        plan.hides_ids = True


def _n_choices(body: Mapping[str, Any]) -> int:
    asked = [body.get(name) for name in ("n_cmpl", "n")]
    return max([1, *(int(n) for n in asked if isinstance(n, int | float))])


def _is_ids(prompt: Any) -> bool:
    """Whether the prompt is a list of token ids, which need not be sent twice."""
    return isinstance(prompt, list) and all(type(item) is int for item in prompt)


def _n_prompts(prompt: Any) -> int:
    """The number of prompts: one, unless it is a list without a token id in it."""
    if not isinstance(prompt, list) or any(type(item) is int for item in prompt):
        return 1
    return len(prompt)


async def _plan_chat(plan: ProxyPlan, body: Mapping[str, Any], engine: LlamaServerEngine) -> None:
    try:
        if plan.dialect is Dialect.MESSAGES:
            body = from_messages(body)
        elif plan.dialect is Dialect.RESPONSES:
            body = from_responses(body)
        messages = body.get("messages")
        if await by_size(count(messages), has_media, messages):
            raise NotText
        if plan.dialect is not Dialect.CHAT:
            text = await engine.apply_template(body)
            plan.ids = await _tokenized(text, engine)
            return
    except (NotText, NotSupported):
        plan.placement = Placement.OPAQUE if plan.can_pin else Placement.FREE
        plan.label = "media"
        return
    if plan.compose and len(plan.body) <= CHAT_BYTES_MAX:
        plan.chat = chat_text_of(body)
    if plan.chat is None:
        await learn(plan, engine)


def check_fits(plan: ProxyPlan, n_ctx: int) -> None:
    """Raises ContextExceeded if the prompt's tokens are known and too many."""
    if plan.ids is not None and len(plan.ids) >= n_ctx:
        raise ContextExceeded.of_request(len(plan.ids), n_ctx)
