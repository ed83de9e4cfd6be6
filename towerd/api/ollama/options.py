"""`options` of a request: the fields of ours that they are. What is set when a model is loaded (num_ctx, num_gpu,
num_thread...) and what Ollama itself does not know is passed over, as Ollama passes over the latter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from towerd.api.http import fields
from towerd.api.http.fields import INT32_MAX, Body
from towerd.errors import InvalidRequest

_Read: TypeAlias = Callable[[str, Any], Any]

_FIELDS: dict[str, tuple[str, _Read]] = {
    "num_keep": ("n_keep", fields.integer),
    "seed": ("seed", fields.integer),
    "top_k": ("top_k", fields.integer),
    "top_p": ("top_p", fields.number),
    "min_p": ("min_p", fields.number),
    "typical_p": ("typical_p", fields.number),
    "repeat_last_n": ("repeat_last_n", fields.integer),
    "temperature": ("temperature", fields.number),
    "repeat_penalty": ("repeat_penalty", fields.number),
    "presence_penalty": ("presence_penalty", fields.number),
    "frequency_penalty": ("frequency_penalty", fields.number),
    "mirostat": ("mirostat", fields.integer),
    "mirostat_tau": ("mirostat_tau", fields.number),
    "mirostat_eta": ("mirostat_eta", fields.number),
}
"""Option -> our field, and how its value is read."""


def sampling(asked: Body, n_ctx: int) -> dict[str, Any]:
    """The fields that a request's options set. n_ctx: as for `of_chat`. Raises InvalidRequest."""
    options = asked.get("options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise fields.wrong_type("options", "object", options)
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _FIELDS and value is not None:
            field, read = _FIELDS[name]
            found[field] = read(f"options.{name}", value)
    if found.get("repeat_last_n") == -1:
        found["repeat_last_n"] = n_ctx  # so Ollama means it
    if options.get("stop") is not None:
        found["stop"] = _stops(options["stop"])
    if options.get("num_predict") is not None:
        n_predict = fields.integer("options.num_predict", options["num_predict"])
        # To Ollama 0 is no limit, like -1; -2 fills the context, at whose end a reply ends anyway.
        found["n_predict"] = min(n_predict, INT32_MAX) if n_predict > 0 else -1
    return found


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise InvalidRequest("Field 'options.stop': must be an array of strings")
    return stops
