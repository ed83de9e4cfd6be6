"""Checks of the model that would be served, from its file alone."""

from __future__ import annotations

from pathlib import Path

from towerd.cli.doctor.check import Check, Finding, fail, ok, warn
from towerd.cli.output import clean, size
from towerd.models.bundled import find_model, has_default
from towerd.models.header import Header, read_header
from towerd.models.known import SMOLLM2
from towerd.settings.config import Config


def file(config: Config) -> Finding:
    """Whether the file is a complete GGUF."""
    path, header = _read(config)
    ram = config.ram_bytes
    found = f"{path}, {size(header.weight_bytes)}, {header.n_tensors} tensors"
    if config.model is None and config.hf_repo is None and not has_default():
        found += f"; towerd models get {SMOLLM2.name} fetches the default model"
    if header.weight_bytes > ram:
        return warn(
            found, f"It is larger than the RAM that it may have ({size(ram)}): use a smaller one."
        )
    return ok(found)


def architecture(config: Config) -> Finding:
    """Where the model's stored state can be resumed."""
    header = _read(config)[1]
    if not header.arch:
        return fail("the file names no architecture", "Convert the model to GGUF again.")
    has_state = header.memory in ("hybrid", "recurrent")
    where = "resumed at state checkpoints" if has_state else "resumed at any token"
    return ok(f"{clean(header.arch)}, {where}, trained for {header.n_ctx_train:,} tokens")


def chat_template(config: Config) -> Finding:
    """The template that turns messages into a prompt."""
    if config.chat_template_source() is not None:
        return ok("set with --chat-template or --chat-template-file")
    if _read(config)[1].has_chat_template:
        return ok("in the model")
    return warn(
        "none in the model: ChatML is used", "Give the right one with --chat-template-file."
    )


def loads(config: Config) -> Finding:
    """Load the model and test the state format on it."""
    from towerd.cli.doctor.build import load_model

    return ok(load_model(config))


def _read(config: Config) -> tuple[Path, Header]:
    """The file that would be served, which is not fetched, and its header. Raises ModelError."""
    path = find_model(config.model, config.hf_repo, config.hf_file)
    return path, read_header(path)


CHECKS = (
    Check("model", "file", file),
    Check("model", "architecture", architecture),
    Check("model", "chat template", chat_template),
)
LOADS = Check("model", "loads", loads)
