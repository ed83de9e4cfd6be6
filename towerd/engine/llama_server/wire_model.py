"""The model of a llama-server as `towerd.wire` takes it: its vocabulary, with that server's templates
and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towerd.engine.base import KEPT_FIELDS
from towerd.engine.llama_server.process.attached import Command
from towerd.engine.llama_server.process.probe import ProbeResult
from towerd.errors import ConfigError
from towerd.model.llama_model import LlamaModel
from towerd.model.vocab import Vocab
from towerd.settings.config import Config
from towerd.settings.llama_flags import words_of
from towerd.wire import Model, Settings

_NOT_DEFAULTS = frozenset(
    (
        "stream",
        "chat_format",
        "reasoning_format",
        "reasoning_in_content",
        "generation_prompt",
        "speculative.types",
        "lora",
        "backend_sampling",
    )
)
"""Parameters in GET /props that are no fields of a request, or no defaults."""


def open_upstream_wire(
    model: LlamaModel, vocab: Vocab, found: ProbeResult, command: Command | None, config: Config
) -> Model:
    """model: the file without its weights. command: how llama-server was started; None: that cannot
    be seen, and its flags about templates and reasoning are taken not to be set.

    Raises ConfigError: a chat template that does not parse here, a flag that this llama.cpp does
    not have."""
    params = found.props.get("default_generation_settings", {}).get("params", {})
    template = str(found.props.get("chat_template", ""))
    has_several = "chat_template_tool_use" in found.props  # which the GGUF alone has
    flags = () if command is None else tuple(words_of(command.flags, "wire", of_any=True))
    settings = Settings(
        name=str(found.props.get("model_alias") or model.path.name),
        n_ctx=found.n_ctx,
        n_parallel=found.n_slots,
        text_bytes_max=config.text_bytes_max(found.n_ctx),
        chat_template="" if has_several else template,
        defaults=_defaults(params),
        flags=flags,
        kept_fields=KEPT_FIELDS,
        is_upstream=True,
    )
    try:
        deep_stack = vocab.with_deep_stack if vocab.is_deep else None
        return Model(model.address, settings.encode(), deep_stack=deep_stack)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"towerd's llama.cpp refuses a chat template or flag of this llama-server: {error}."
        ) from error


def _defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    """llama-server's default sampling parameters, as fields of a request."""
    return {name: value for name, value in params.items() if name not in _NOT_DEFAULTS}
