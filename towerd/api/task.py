"""A completion request, parsed: what to run and how to answer."""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from towerd.anticipate import can_anticipate
from towerd.api import fields
from towerd.api.chat import chat_fields, render_chat
from towerd.api.constraint import chat_grammar, native_grammar
from towerd.api.fields import INT32_MAX, Body
from towerd.api.hints import Hints, agent_of
from towerd.api.limits import Limits
from towerd.api.live import parse_live
from towerd.api.models import check_model
from towerd.api.off_loop import by_size, count
from towerd.api.prompts import PromptLimit, tokenize_prompts
from towerd.api.sampling import SEED_MASK, parse_sampling
from towerd.config import Config
from towerd.engine.base import Engine, GenerateRequest, Ids, SamplingParams
from towerd.errors import InvalidRequest


class Shape(enum.Enum):
    """Whose response format the endpoint speaks."""

    NATIVE = "native"
    COMPLETION = "completion"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Task:
    """One HTTP completion request: one GenerateRequest per choice, and how to present them."""

    shape: Shape
    id: str
    model: str
    requests: tuple[GenerateRequest, ...]
    """In the order of their `index`: n for each prompt."""
    n_per_prompt: int
    stream: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    return_tokens: bool = False
    verbose: bool = False
    response_fields: tuple[str, ...] = ()
    ping_s: float | None = None
    """Seconds of silence before an SSE comment; None: never."""


_NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Caller:
    """What the request's headers and key say, as opposed to its body."""

    scope: str
    hints: Hints = _NO_HINTS


async def parse_task(
    body: Body, shape: Shape, caller: Caller, engine: Engine, config: Config, limits: Limits
) -> Task:
    """Check and tokenize a request body.

    Raises InvalidRequest, ContextExceeded, NotFound (model), NotSupported."""
    check_model(body, engine)
    agent = caller.hints.agent
    if shape is Shape.CHAT:
        if agent is None:
            agent = await by_size(count([body.get("messages"), body.get("tools")]), agent_of, body)
        body = chat_fields(body)
        grammar = await chat_grammar(body)
        prompt: Any = await render_chat(body, engine)
    else:
        grammar = await native_grammar(body)
        if "prompt" not in body:
            raise InvalidRequest("'prompt' is required")
        prompt = body["prompt"]
    sampling = await parse_sampling(body, engine, grammar=grammar, n_probs_max=limits.probs_max)
    n = fields.integer_in(body, ("n_cmpl", "n"), 1, 1, engine.n_slots)
    template = replace(
        _template(body, sampling, caller, config, limits),
        agent=agent,
        chat=_chat(body, shape),
        live=parse_live(body, config, engine.n_ctx),
    )
    may_outgrow = template.live.policy in engine.outgrowing
    limit = PromptLimit(engine.n_ctx, config.prompt_tokens_max if may_outgrow else 0)
    prompts = await tokenize_prompts(prompt, engine, limit, limits.prompts_max)
    n_choices = n * len(prompts)
    if n_choices > limits.choices_max:
        raise InvalidRequest(
            f"A request may have {limits.choices_max} choices of all its prompts together, but "
            f"this asks for {n_choices}"
        )
    return Task(
        shape=shape,
        id="chatcmpl-" + "".join(secrets.choice(_ALPHABET) for _ in range(32)),
        model=engine.info.alias,
        requests=await by_size(n_choices, _choices, template, prompts, n),
        n_per_prompt=n,
        stream=fields.boolean(body, "stream", False),
        include_usage=fields.boolean(_options(body), "include_usage", False),
        timings_per_token=fields.boolean(body, "timings_per_token", False),
        return_tokens=fields.boolean(body, "return_tokens", False),
        verbose=fields.boolean(body, "verbose", False),
        response_fields=tuple(fields.strings(body, "response_fields")),
        ping_s=_ping_s(body, limits),
    )


_ALPHABET = string.ascii_letters + string.digits


def _options(body: Body) -> Mapping[str, Any]:
    return fields.mapping(body, "stream_options")


def _ping_s(body: Body, limits: Limits) -> float | None:
    seconds = fields.integer_in(body, ("sse_ping_interval",), int(limits.ping_s), -1, INT32_MAX)
    return float(seconds) if seconds > 0 else None


def _template(
    body: Body, sampling: SamplingParams, caller: Caller, config: Config, limits: Limits
) -> GenerateRequest:
    """The request without its prompt."""
    for name in ("n_discard", "n_cache_reuse"):  # checked as llama-server does, used by nothing
        fields.integer_in(body, (name,), 0, 0, INT32_MAX)
    n_predict = fields.integer_in(
        body, ("n_predict", "max_completion_tokens", "max_tokens"), config.n_predict, -1, INT32_MAX
    )
    return GenerateRequest(
        ids=_NO_IDS,
        sampling=sampling,
        n_predict=n_predict,
        stop=_stop(body),
        scope=caller.scope,
        session=caller.hints.session,
        workflow=caller.hints.workflow,
        cache_prompt=fields.boolean(body, "cache_prompt", True),
        return_progress=fields.boolean(body, "return_progress", False)
        and fields.boolean(body, "stream", False),
        n_keep=fields.integer_in(body, ("n_keep",), 0, -1, INT32_MAX),
    )


def _chat(body: Body, shape: Shape) -> Mapping[str, Any] | None:
    """What the template needs of a chat request, in a list of our own: the body is emptied."""
    if shape is not Shape.CHAT or not can_anticipate(body):
        return None
    kept = {name: body[name] for name in _TEMPLATE_FIELDS if name in body}
    return {**kept, "messages": list(body["messages"])}


_TEMPLATE_FIELDS = ("tools", "chat_template_kwargs", "reasoning_effort")
_NO_IDS: Ids = np.zeros(0, dtype=np.int32)


def _choices(template: GenerateRequest, prompts: list[Ids], n: int) -> tuple[GenerateRequest, ...]:
    return tuple(_choice(template, ids, k) for ids in prompts for k in range(n))


def _choice(template: GenerateRequest, ids: Ids, k: int) -> GenerateRequest:
    """The k-th choice of one prompt: as llama-server, a fixed seed is counted up."""
    sampling = template.sampling
    if k and sampling.seed != -1:
        sampling = replace(sampling, seed=(sampling.seed + k) & SEED_MASK)
    return replace(template, ids=ids, sampling=sampling)


def _stop(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    words = [value] if isinstance(value, str) else fields.strings(body, "stop")
    return tuple(word for word in words if word)
