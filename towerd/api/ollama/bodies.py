"""Bodies of `/api/chat` and `/api/generate` as those of our routes that answer them."""

from __future__ import annotations

from typing import Any

from towerd.api.http import fields
from towerd.api.http.fields import Body
from towerd.api.ollama.messages import chat_messages, with_pictures
from towerd.api.ollama.options import sampling
from towerd.errors import InvalidRequest, NotSupported

CHAT, COMPLETION, INFILL = "/v1/chat/completions", "/completion", "/infill"
"""The routes that answer."""
_LEVELS = ("high", "medium", "low")
_UNSERVED = {
    "template": "a model's own template is used; one of your own needs 'raw' and a whole prompt",
    "context": "send the earlier messages to /api/chat, whose rows are kept",
}
"""Fields of /api/generate that are refused, and what to do instead."""

Translated = tuple[str, dict[str, Any]]
"""A route and the body for it, without `stream` and `model`."""


def of_chat(asked: Body, n_ctx: int) -> Translated:
    """A body of /api/chat. n_ctx: the context that the model is served with. Raises InvalidRequest."""
    body: dict[str, Any] = {"messages": chat_messages(asked.get("messages"))}
    tools = asked.get("tools")
    if tools:
        if not isinstance(tools, list):
            raise fields.wrong_type("tools", "array", tools)
        body["tools"] = [_tool(each) for each in tools]
    return CHAT, body | _chat_fields(asked, n_ctx)


def of_generate(asked: Body, n_ctx: int) -> Translated:
    """A body of /api/generate, whose prompt is a user's message, or as it is where that is asked for, or text
    around a gap. n_ctx: as for `of_chat`. Raises InvalidRequest, NotSupported."""
    for name, instead in _UNSERVED.items():
        if asked.get(name):
            raise NotSupported(f"Field '{name}' is not supported: {instead}")
    prompt, suffix = fields.string(asked, "prompt", ""), fields.string(asked, "suffix", "")
    is_raw, pictures = fields.boolean(asked, "raw", False), asked.get("images")
    if (is_raw or suffix) and pictures:
        raise NotSupported(
            "Field 'images' needs the model's template: leave out 'raw' and 'suffix'"
        )
    if suffix:
        return INFILL, {"input_prefix": prompt, "input_suffix": suffix} | _text_fields(asked, n_ctx)
    if is_raw:
        return COMPLETION, {"prompt": prompt} | _text_fields(asked, n_ctx)
    messages: list[Any] = [{"role": "user", "content": with_pictures(prompt, pictures, "images")}]
    if system := fields.string(asked, "system", ""):
        messages.insert(0, {"role": "system", "content": system})
    return CHAT, {"messages": messages} | _chat_fields(asked, n_ctx)


def has_alternatives(asked: Body) -> bool:
    """Whether a reply's tokens come with others that were likely. Ours come with one at least."""
    return bool(asked.get("top_logprobs"))


def _tool(value: Any) -> Any:
    """A tool, which Ollama's programs may leave the type of out: there is one alone."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        return value | {"type": value.get("type") or "function"}
    return value


def _chat_fields(asked: Body, n_ctx: int) -> dict[str, Any]:
    body = sampling(asked, n_ctx) | _thinking(asked.get("think"))
    schema = _format(asked.get("format"))
    if schema is not None:
        body["response_format"] = (
            {"type": "json_schema", "json_schema": {"schema": schema}}
            if schema
            else {"type": "json_object"}
        )
    if (n_top := _top_logprobs(asked)) is not None:
        body |= {"logprobs": True, "top_logprobs": max(1, n_top)}
    return body


def _text_fields(asked: Body, n_ctx: int) -> dict[str, Any]:
    body = sampling(asked, n_ctx)
    schema = _format(asked.get("format"))
    if schema is not None:
        body["json_schema"] = schema or {"type": "object"}
    if (n_top := _top_logprobs(asked)) is not None:
        body["n_probs"] = max(1, n_top)
    return body


def _format(value: Any) -> dict[str, Any] | None:
    """The schema that a reply must keep to; empty for any JSON object, None for any text."""
    if value is None or value == "":
        return None
    if value == "json":
        return {}
    if isinstance(value, dict):
        return value
    raise InvalidRequest("Field 'format': must be \"json\" or a JSON schema, which is an object")


def _thinking(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"chat_template_kwargs": {"enable_thinking": value}}
    if value in _LEVELS:
        known = {"enable_thinking": True, "reasoning_effort": value}
        return {"chat_template_kwargs": known}
    raise InvalidRequest(
        "Field 'think': must be true, false, " + ", ".join(f'"{level}"' for level in _LEVELS)
    )


def _top_logprobs(asked: Body) -> int | None:
    """The number of alternatives to each token whose probabilities are asked for; None: nothing is."""
    n_top = fields.integer_in(asked, ("top_logprobs",), 0, 0, 20)
    return n_top if fields.boolean(asked, "logprobs", False) or n_top else None
