"""The loaded model as `towerd.wire` takes it: with the daemon's settings and its tokenizer."""

from __future__ import annotations

from typing import Any

from towerd.engine.embedded.context.core import Core
from towerd.errors import ConfigError
from towerd.model.request_body import KEPT_FIELDS
from towerd.model.retokenize import Retokenizer
from towerd.models.known import metadata_of
from towerd.settings.config import Config
from towerd.settings.llama_flags import words_of
from towerd.wire import Model, Settings, recommended


def open_wire(core: Core, config: Config, retokenizer: Retokenizer) -> Model:
    """Raises ConfigError: a chat template that does not parse or renders no example, a flag's value
    that llama.cpp does not take."""
    settings = Settings(
        name=core.info.alias,
        n_ctx=core.n_ctx,
        text_bytes_max=config.text_bytes_max(core.n_ctx),
        n_parallel=config.parallel,
        n_batch=config.batch_size,
        chat_template=config.chat_template_source() or _known_template(core),
        defaults={**recommended(core.info.metadata), "n_predict": config.n_predict},
        flags=tuple(words_of(config.llama_server_args, "wire")),
        kept_fields=KEPT_FIELDS,
    )

    def tokenize(text: str) -> Any:
        return retokenizer.tokenize(text, add_special=True, parse_special=True)

    try:
        deep_stack = core.vocab.with_deep_stack if core.vocab.is_deep else None
        return Model(core.model.address, settings.encode(), tokenize, core.projector, deep_stack)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"llama.cpp refuses a chat template or flag: {error}.") from error


def _known_template(core: Core) -> str:
    """What a known model's template is replaced by; empty: the GGUF's own is used."""
    return metadata_of(core.model.path).get("tokenizer.chat_template", "")
