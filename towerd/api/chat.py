"""A chat request: its messages, what this engine cannot do with them, and its prompt text."""

from __future__ import annotations

from typing import Any

from towerd.api import fields
from towerd.api.body import json_type
from towerd.api.fields import Body
from towerd.api.off_loop import by_size, count
from towerd.engine.base import Engine
from towerd.errors import InvalidRequest, NotSupported

_ELSEWHERE = "the llama-server engine can"
TOP_LOGPROBS_DEFAULT = 20


async def render_chat(body: Body, engine: Engine) -> str:
    """The prompt text of a chat request. Raises InvalidRequest, NotSupported."""
    n_values = count(body.get("messages"))
    return await engine.apply_template(await by_size(n_values, _normalised, body))


def chat_fields(body: Body) -> dict[str, Any]:
    """The body with OpenAI's logprobs fields turned into llama-server's `n_probs`.

    Raises InvalidRequest."""
    out = dict(body)
    asked = body.get("logprobs")
    if asked is None or asked is False:
        if body.get("top_logprobs") is not None:
            raise InvalidRequest("top_logprobs requires logprobs to be set to true")
        return out
    if asked is True:
        out.pop("logprobs")
        top = body.get("top_logprobs")
        out["n_probs"] = (
            TOP_LOGPROBS_DEFAULT if top is None else fields.integer("top_logprobs", top)
        )
    return out


def _normalised(body: Body) -> dict[str, Any]:
    _refuse_tools(body)
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequest("'messages' is required")
    if not isinstance(messages, list):
        raise InvalidRequest("Expected 'messages' to be an array")
    fields.mapping(body, "chat_template_kwargs")
    checked = [_message(message) for message in messages]
    if [message.get("role") for message in checked[-2:]] == ["assistant", "assistant"]:
        raise InvalidRequest("Cannot have 2 or more assistant messages at the end of the list.")
    return {**body, "messages": checked}


def _refuse_tools(body: Body) -> None:
    choice = body.get("tool_choice")
    if body.get("tools") or body.get("functions") or choice not in (None, "none", "auto"):
        raise NotSupported(f"The embedded engine cannot call tools; {_ELSEWHERE}")


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"Each message must be an object, but one is {json_type(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest("Each message must have a 'role' string")
    if "content" not in message:
        if role != "assistant":
            raise InvalidRequest("All non-assistant messages must contain 'content'")
        if not message.get("tool_calls"):
            raise InvalidRequest("Assistant message must contain either 'content' or 'tool_calls'!")
        return message
    content = message["content"]
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise InvalidRequest("Expected 'content' to be a string or an array")
    return {**message, "content": "\n".join(_part(part) for part in content)}


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"Each content part must be an object, but one is {json_type(part)}")
    kind = part.get("type")
    if kind == "text":
        return fields.string(part, "text", "")
    if kind in ("image_url", "input_audio", "input_video", "video_url", "file"):
        raise NotSupported(
            f"The embedded engine cannot read content of type '{kind}'; {_ELSEWHERE}"
        )
    raise InvalidRequest("unsupported content[].type")
