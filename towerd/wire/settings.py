"""The settings by which a model's requests are parsed, as on llama-server's command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

Endpoint: TypeAlias = Literal[
    "completion", "completions", "chat", "responses", "messages", "infill", "transcription"
]
"""POST /completion, /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /infill,
/v1/audio/transcriptions."""
_PREFIX = "general.sampling."


def _samplers(value: str) -> list[str]:
    return [name for name in value.split(";") if name]


_FROM_MODEL: dict[str, tuple[str, Callable[[str], Any]]] = {
    "sequence": ("samplers", _samplers),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temp": ("temperature", float),
    "penalty_last_n": ("repeat_last_n", int),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}
"""A GGUF's recommendations, by the end of the key: the request's field, and how to parse it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a model's requests are parsed with; everything else is llama-server's default, or said by
    `flags`."""

    name: str
    """The model's name in replies."""
    n_ctx: int
    """Tokens that one sequence may hold."""
    n_parallel: int
    """Choices that one prompt may have."""
    text_bytes_max: int = 0
    """Bytes of text that are tokenized at once; 0: any number."""
    media_bytes_max: int = 0
    """Bytes that the media of a prompt take once they are decoded; 0: a gibibyte."""
    n_batch: int = 2048
    """Limits how much of an infill's text is used."""
    chat_template: str = ""
    """Jinja source or `chatml`; empty: the model's own."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of a request's fields: `n_predict`, `temperature`..."""
    flags: tuple[str, ...] = ()
    """Words of a llama-server command line, which override the fields above."""
    kept_fields: tuple[str, ...] = ()
    """Top-level fields of a body that `Request.field` returns."""
    is_upstream: bool = False
    """Whether a llama-server evaluates the requests: they keep what `Request.upstream_body` sends it."""

    def encode(self) -> bytes:
        """The JSON that the C++ side reads."""
        return msgspec.json.encode(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorOptions:
    """How a projector is loaded, with llama-server's defaults."""

    path: str
    digest: str
    """Identifies the file and everything else that determines its encoding of a medium."""
    n_threads: int
    use_gpu: bool = True
    image_min_tokens: int = -1
    image_max_tokens: int = -1
    warmup: bool = True

    def encode(self) -> bytes:
        """The JSON that the C++ side reads."""
        return msgspec.json.encode(asdict(self))


def recommended(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The sampling parameters that a GGUF's metadata recommends, for `Settings.defaults`. Values
    that cannot be parsed are left out, as in llama.cpp."""
    out: dict[str, Any] = {}
    for name, (field_name, read) in _FROM_MODEL.items():
        value = metadata.get(_PREFIX + name, "")
        try:
            if value:
                out[field_name] = read(value)
        except ValueError:
            continue
    return out
