"""ModelDescription: the model that an upstream serves, and what its rows depend on.

The model file is read as the embedded engine reads it, only without its weights, so that both
engines write the same row identity and one reads the other's store.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towerd.engine.base import KEPT_FIELDS, ModelInfo
from towerd.engine.llama_server.process.attached import Command
from towerd.engine.llama_server.process.probe import ProbeResult
from towerd.errors import ConfigError
from towerd.kernels.formats import BY_NAME
from towerd.model.llama_model import LlamaModel
from towerd.model.model_file import ModelFile, weights_hash
from towerd.model.row_flags import (
    cache_framing,
    has_rotation,
    is_rotated,
    row_overrides,
    whole_arch,
)
from towerd.model.vocab import Vocab
from towerd.settings.config import Config
from towerd.settings.llama_flags import canonical, words_of
from towerd.slots.kind import WHOLE
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import REPORTED_HASH_PREFIX, RowIdentity, tokenizer_hash
from towerd.store import Catalog
from towerd.wire import Model, Settings

log = logging.getLogger(__name__)

_NO_FILE_NOTE = (
    "The file that this llama-server serves is not readable here, so its rows are kept apart from "
    "those of the embedded engine."
)
_NO_COMMAND_NOTE = (
    "The command line of llama-server cannot be seen, so its flags of RoPE and cache are taken never to change; "
    "run both as one user."
)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model behind an upstream, and its file here, without weights."""

    info: ModelInfo
    vocab: Vocab
    model: LlamaModel
    wire: Model
    adapter_names: tuple[str, ...]
    """What identifies the file of each of its LoRA adapters."""
    notes: tuple[str, ...] = ()
    adapters: tuple[ModelFile, ...] = ()
    """The files of its adapters that can be read here."""
    files: tuple[ModelFile, ...] = ()
    """Every file that the row identity has the hash of."""

    def close(self) -> None:
        """Close the adapters; the model belongs to the backend."""
        for file in self.adapters:
            file.close()


def flag_notes(command: Command | None, *, is_ours: bool) -> tuple[str, ...]:
    """Notes on flags of a server that cost something; towerd sets some of them itself."""
    if command is None:
        return ()
    notes: list[str] = []
    flags = {canonical(flag) for flag in command.flags}
    if "--sleep-idle-seconds" in flags:
        notes.append(
            "It unloads its model when idle, and what its slots hold with it, so the next turn of "
            "each chat is a restore at best: start llama-server without --sleep-idle-seconds."
        )
    if is_ours:
        return tuple(notes)
    if flags.isdisjoint(("-cram", "--cache-ram")):
        notes.append(
            "It keeps a second copy of prompts, of all tenants together, in its own RAM cache: "
            "start llama-server with --cache-ram 0."
        )
    if "--cache-reuse" in flags:
        notes.append(
            "Its --cache-reuse moves rows of similar prompts, which is not exact: slots where that "
            "happened are never stored."
        )
    return tuple(notes)


def has_ram_cache(command: Command) -> bool:
    """Whether it keeps prompts in a RAM cache of its own."""
    values, size = iter(command.flags), ""
    for word in values:
        name, _, value = word.partition("=")
        if canonical(name) in ("-cram", "--cache-ram"):
            size = value or next(values, "")
    return size != "0"


def open_vocab(path: Path, config: Config) -> LlamaModel:
    """The model file without its weights. Raises ModelError."""
    return LlamaModel(path, config, vocab_only=True)


def sliding_window(model: LlamaModel | None) -> int:
    """The window that the model file names; 0: none."""
    text = "" if model is None else model.key("attention.sliding_window")
    return int(text) if text.isdigit() else 0


def keeps_state(model: LlamaModel) -> bool:
    """Whether a model with a sliding window has a state of another kind besides, so that its slots are
    stored whole. One with compressed keys has no window as far as llama-server knows."""
    return model.is_hybrid or (model.has_indexer and not model.is_compressed)


def describe(
    config: Config,
    found: ProbeResult,
    model: LlamaModel,
    command: Command | None,
    meta: Mapping[str, Any],
    catalog: Catalog,
) -> ModelDescription:
    """What `found` serves. `model`: its file, or one of the same vocabulary; `command`: how it was
    started, None if that cannot be seen; `meta`: the model's entry in /v1/models; `catalog`
    remembers the file's hash. Raises ConfigError: the file has another vocabulary."""
    vocab = Vocab(model.ptr)
    _check_vocabulary(model, vocab, meta)
    layout = found.spec.layout if found.spec is not None else _NO_LAYOUT
    paths = [Path(str(each.get("path", ""))) for each in found.loras]
    adapters = {path: ModelFile(path) for path in dict.fromkeys(paths) if path.is_file()}
    names = [adapters[p].identify(catalog) if p in adapters else str(p) for p in paths]
    lora = tuple(
        f"{name}@{float(each['scale'])!r}"
        for name, each in zip(names, found.loras, strict=True)
        if float(each["scale"]) != 0.0
    )
    notes = flag_notes(command, is_ours=config.upstream is None)
    files = tuple(adapters.values())
    if Path(found.model_path).is_file():
        files += tuple(model.files)
        if command is None:
            notes += (_NO_COMMAND_NOTE,)
        row_identity = _own_identity(config, found, model, vocab, command, layout, lora, catalog)
    else:
        notes += (_NO_FILE_NOTE,)
        row_identity = _reported_identity(found, vocab, meta, command, layout, lora)
    info = _info(found, model, vocab, meta, row_identity)
    wire = _open_wire(model, vocab, found, command, config)
    return ModelDescription(
        info, vocab, model, wire, tuple(names), notes, tuple(adapters.values()), files
    )


def _check_vocabulary(model: LlamaModel, vocab: Vocab, meta: Mapping[str, Any]) -> None:
    n_vocab = int(meta.get("n_vocab", vocab.n_vocab))
    if n_vocab != vocab.n_vocab:
        raise ConfigError(
            f"{model.path} has a vocabulary of {vocab.n_vocab} tokens, the model of the "
            f"--upstream one of {n_vocab}: give the GGUF that it serves with -m."
        )


def _own_identity(
    config: Config,
    found: ProbeResult,
    model: LlamaModel,
    vocab: Vocab,
    command: Command | None,
    layout: KVLayout,
    lora: tuple[str, ...],
    catalog: Catalog,
) -> RowIdentity:
    """The row identity that the embedded engine has for the same file, flags and cache."""
    rope = model.rope(config)
    if command is None:
        rope = {"upstream": "unseen", **rope}
        command = Command()
    rotated = has_rotation(command.env)
    counts = model.key("attention.head_count_kv", "1").strip("[]").split(",")  # of each layer
    n_head_kv = max(1, *map(int, counts))
    return RowIdentity(
        model_hash=weights_hash(model.files, catalog),
        arch=_arch(model.arch, found, command),
        tokenizer=tokenizer_hash(vocab.pieces),
        rope=rope | row_overrides(command.flags, command.env),
        lora=lora,
        layout=layout,
        rot_k=rotated and bool(layout.k) and is_rotated(layout.k[0], n_head_kv),
        rot_v=rotated and bool(layout.v) and is_rotated(layout.v[0], n_head_kv),
        long_context=model.is_long_context(found.n_ctx),
    )


def _arch(arch: str, found: ProbeResult, command: Command) -> str:
    """The row identity's `arch`."""
    if found.spec is None or found.spec.kind is not WHOLE:
        return arch
    framing = cache_framing(command.flags, command.env, found.spec.n_stream)
    return whole_arch(arch, framing, is_rotated=has_rotation(command.env))


_NO_LAYOUT = KVLayout((Plane(BY_NAME["f16"].type_id, 2),), ())
"""Stands in a row identity for states that towerd never stores."""


def _info(
    found: ProbeResult,
    model: LlamaModel,
    vocab: Vocab,
    meta: Mapping[str, Any],
    row_identity: RowIdentity,
) -> ModelInfo:
    props = found.props
    return ModelInfo(
        path=found.model_path,
        alias=str(props.get("model_alias") or Path(found.model_path).name),
        description=str(meta.get("ftype", "")),
        n_vocab=vocab.n_vocab,
        n_ctx_train=int(meta.get("n_ctx_train", 0)),
        n_embd=int(meta.get("n_embd", 0)),
        n_params=int(meta.get("n_params", 0)),
        size_bytes=int(meta.get("size", 0)),
        vocab_type=int(meta.get("vocab_type", 0)),
        bos_token=str(props.get("bos_token", "")),
        eos_token=str(props.get("eos_token", "")),
        chat_template=str(props.get("chat_template", "")),
        row_identity=row_identity,
        kv_bytes_per_token=row_identity.layout.token_bytes if found.spec is not None else 0,
        metadata=model.metadata,
        has_media=any(bool(props.get("modalities", {}).get(name)) for name in _MEDIA),
    )


_MEDIA = ("vision", "audio", "video")


def _reported_identity(
    found: ProbeResult,
    vocab: Vocab,
    meta: Mapping[str, Any],
    command: Command | None,
    layout: KVLayout,
    lora: tuple[str, ...],
) -> RowIdentity:
    """A row identity from what the server says about its model."""
    known = {key: meta.get(key) for key in ("n_vocab", "n_embd", "n_params", "size", "ftype")}
    text = json.dumps([found.model_path, known], sort_keys=True)
    return RowIdentity(
        model_hash=REPORTED_HASH_PREFIX
        + hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        arch=_arch("", found, command or Command()),
        tokenizer=tokenizer_hash(vocab.pieces),
        rope={"upstream": "unseen", "n_ctx": float(found.n_ctx)},
        lora=lora,
        layout=layout,
        rot_k=False,
        rot_v=False,
        long_context=False,
    )


def first_model(models: Any) -> Mapping[str, Any]:
    """The `meta` of the first entry of /v1/models; {} if there is none."""
    entries: Sequence[Any] = models.get("data", []) if isinstance(models, Mapping) else []
    meta = entries[0].get("meta") if entries else None
    return meta if isinstance(meta, Mapping) else {}


# ---- as towerd.wire takes it --------------------------------------------------------------------

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


def _open_wire(
    model: LlamaModel, vocab: Vocab, found: ProbeResult, command: Command | None, config: Config
) -> Model:
    """The model's vocabulary with that server's templates and defaults. command: how it was started;
    None: that cannot be seen, and its flags about templates and reasoning are taken not to be set.

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
