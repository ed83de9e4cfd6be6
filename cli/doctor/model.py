"""Checks of the model that would be served, from its file alone."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from gguf import GGUFReader

from towerd.cli.doctor.check import Check, Finding, fail, ok, warn
from towerd.cli.output import clean, size
from towerd.errors import ModelError
from towerd.models.bundled import find_model, has_default
from towerd.models.known import SMOLLM2
from towerd.settings.config import Config

STATE_KEYS = ("ssm.", "wkv.", "shortconv.", "kda.")
"""Prefixes of metadata keys of recurrent layers."""


def file(config: Config) -> Finding:
    """Whether the file is a complete GGUF."""
    path = find_model(config.model)
    reader = _read(path)
    n_bytes, ram = path.stat().st_size, psutil.virtual_memory().total
    found = f"{path}, {size(n_bytes)}, {len(reader.tensors)} tensors"
    if config.model is None and not has_default():
        found += f"; towerd models get {SMOLLM2.name} fetches the default model"
    if n_bytes > ram:
        return warn(
            found, f"It is larger than this machine's RAM ({size(ram)}): use a smaller one."
        )
    return ok(found)


def architecture(config: Config) -> Finding:
    """Where the model's stored state can be resumed."""
    reader = _read(find_model(config.model))
    arch = str(_value(reader, "general.architecture", ""))
    if not arch:
        return fail("the file names no architecture", "Convert the model to GGUF again.")
    n_ctx = int(_value(reader, f"{arch}.context_length", 0))
    where = "resumed at state checkpoints" if has_state(reader, arch) else "resumed at any token"
    return ok(f"{clean(arch)}, {where}, trained for {n_ctx:,} tokens")


def has_state(reader: GGUFReader, arch: str) -> bool:
    """Whether the metadata indicates recurrent layers, whose state depends on the whole prefix. The
    engine decides when it loads the model."""
    keys = [key.removeprefix(f"{arch}.") for key in reader.fields]
    return arch.startswith("rwkv") or any(key.startswith(STATE_KEYS) for key in keys)


def chat_template(config: Config) -> Finding:
    """The template that turns messages into a prompt."""
    if config.chat_template_source() is not None:
        return ok("set with --chat-template or --chat-template-file")
    if _value(_read(find_model(config.model)), "tokenizer.chat_template", ""):
        return ok("in the model")
    return warn(
        "none in the model: ChatML is used", "Give the right one with --chat-template-file."
    )


def loads(config: Config) -> Finding:
    """Load the model and test the state format on it."""
    from towerd.cli.doctor.build import load_model

    return ok(load_model(config))


@lru_cache(maxsize=1)
def _read(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # the reader raises whatever its parsing runs into
        raise ModelError(
            f"{path} is not a whole GGUF file ({error}); download or convert it again."
        ) from error


def _value(reader: GGUFReader, key: str, default: Any) -> Any:
    """A metadata value; for a list (one value per layer) the largest."""
    field = reader.get_field(key)
    value = default if field is None else field.contents()
    return max(value, default=default) if isinstance(value, list) else value


CHECKS = (
    Check("model", "file", file),
    Check("model", "architecture", architecture),
    Check("model", "chat template", chat_template),
)
LOADS = Check("model", "loads", loads)
