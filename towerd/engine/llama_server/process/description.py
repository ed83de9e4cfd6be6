"""ModelDescription: the model that an upstream serves, and what its rows depend on.

The model file is read as the embedded engine reads it, only without its weights, so that both
engines write the same fingerprint and one reads the other's store.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towerd.engine.base import ModelInfo
from towerd.engine.embedded.model.core import is_rotated
from towerd.engine.embedded.model.model import LlamaModel
from towerd.engine.embedded.model.vocab import Vocab
from towerd.engine.llama_server.process.attached import Command
from towerd.engine.llama_server.process.probe import ProbeResult
from towerd.engine.model_file import ModelFile, weights_hash
from towerd.engine.row_flags import row_overrides
from towerd.errors import ModelError
from towerd.kernels.formats import BY_NAME
from towerd.settings.config import Config
from towerd.settings.llama_flags import canonical
from towerd.slots.fingerprint import REPORTED_HASH_PREFIX, Fingerprint, tokenizer_hash
from towerd.slots.layout import KVLayout, Plane
from towerd.store import Catalog
from towerd.wire import token_bytes_max

log = logging.getLogger(__name__)

_NO_FILE_NOTE = (
    "The model file is not readable here, so its rows are kept apart from those of the embedded "
    "engine."
)
_NO_COMMAND_NOTE = (
    "The command line of llama-server cannot be seen, so its RoPE flags are taken never to change; "
    "run both as one user."
)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model behind an upstream. `vocab` None: its file cannot be read here."""

    info: ModelInfo
    vocab: Vocab | None
    model: LlamaModel | None
    notes: tuple[str, ...] = ()
    adapters: tuple[ModelFile, ...] = ()
    """The files of the adapters in force that can be read here."""
    token_bytes_max: int = 0
    """Bytes of text that one token stands for, at most; 0: any number, or not known."""

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """Every file that the fingerprint has the hash of."""
        own = () if self.model is None else self.model.files
        return own + self.adapters

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


def open_vocab(path: Path | None, config: Config) -> LlamaModel | None:
    """The model file without its weights, or None when it is not here or not readable."""
    if path is None or not path.is_file():
        return None
    try:
        return LlamaModel(path, config, vocab_only=True)
    except ModelError as error:
        log.warning("the upstream's model file cannot be read here", extra={"error": error.message})
        return None


def sliding_window(model: LlamaModel | None) -> int:
    """The window that the model file names; 0: none."""
    text = "" if model is None else model.key("attention.sliding_window")
    return int(text) if text.isdigit() else 0


def describe(
    config: Config,
    found: ProbeResult,
    model: LlamaModel | None,
    command: Command | None,
    meta: Mapping[str, Any],
    catalog: Catalog,
) -> ModelDescription:
    """What `found` serves. `command`: how it was started, None if that cannot be seen;
    `meta`: the model's entry in /v1/models; `catalog` remembers the file's hash."""
    layout = found.spec.layout if found.spec is not None else _NO_LAYOUT
    in_force = [each for each in found.loras if float(each["scale"]) != 0.0]
    paths = [Path(str(each.get("path", ""))) for each in in_force]
    adapters = {path: ModelFile(path) for path in dict.fromkeys(paths) if path.is_file()}
    names = [adapters[p].identify(catalog) if p in adapters else str(p) for p in paths]
    lora = tuple(
        f"{name}@{float(each['scale'])!r}" for name, each in zip(names, in_force, strict=True)
    )
    notes = flag_notes(command, is_ours=config.upstream is None)
    vocab = Vocab(model.ptr) if model is not None else None
    if model is None or vocab is None:
        notes += (_NO_FILE_NOTE,)
        fingerprint = _reported_fingerprint(found, meta, layout, lora)
    else:
        rope = model.rope(config) if command is not None else {"upstream": "unseen"}
        if command is None:
            rope |= model.rope(config)
            notes += (_NO_COMMAND_NOTE,)
            command = Command()
        rotated = command.env.get("LLAMA_ATTN_ROT_DISABLE", "0") in ("", "0")
        n_head_kv = int(model.key("attention.head_count_kv", "1").strip("[]").split(",")[0]) or 1
        fingerprint = Fingerprint(
            model_hash=weights_hash(model.files, catalog),
            arch=model.arch,
            tokenizer=tokenizer_hash(vocab.pieces),
            rope=rope | row_overrides(command.flags, command.env),
            lora=lora,
            layout=layout,
            rot_k=rotated and is_rotated(layout.k[0], n_head_kv),
            rot_v=rotated and bool(layout.v) and is_rotated(layout.v[0], n_head_kv),
            long_context=model.is_long_context(found.n_ctx),
        )
    info = _info(found, model, vocab, meta, fingerprint)
    token_bytes = 0 if model is None else token_bytes_max(model.address)
    return ModelDescription(info, vocab, model, notes, tuple(adapters.values()), token_bytes)


_NO_LAYOUT = KVLayout((Plane(BY_NAME["f16"].type_id, 2),), ())
"""Stands in a fingerprint for states that towerd never stores."""


def _info(
    found: ProbeResult,
    model: LlamaModel | None,
    vocab: Vocab | None,
    meta: Mapping[str, Any],
    fingerprint: Fingerprint,
) -> ModelInfo:
    props = found.props
    return ModelInfo(
        path=found.model_path,
        alias=str(props.get("model_alias") or Path(found.model_path).name),
        description=str(meta.get("ftype", "")),
        n_vocab=vocab.n_vocab if vocab is not None else int(meta.get("n_vocab", 0)),
        n_ctx_train=int(meta.get("n_ctx_train", 0)),
        n_embd=int(meta.get("n_embd", 0)),
        n_params=int(meta.get("n_params", 0)),
        size_bytes=int(meta.get("size", 0)),
        vocab_type=int(meta.get("vocab_type", 0)),
        bos_token=str(props.get("bos_token", "")),
        eos_token=str(props.get("eos_token", "")),
        chat_template=str(props.get("chat_template", "")),
        fingerprint=fingerprint,
        kv_bytes_per_token=fingerprint.layout.token_bytes if found.spec is not None else 0,
        metadata=model.metadata if model is not None else {},
    )


def _reported_fingerprint(
    found: ProbeResult, meta: Mapping[str, Any], layout: KVLayout, lora: tuple[str, ...]
) -> Fingerprint:
    """A fingerprint from what the server says about its model."""
    known = {key: meta.get(key) for key in ("n_vocab", "n_embd", "n_params", "size", "ftype")}
    text = json.dumps([found.model_path, known], sort_keys=True)
    return Fingerprint(
        model_hash=REPORTED_HASH_PREFIX
        + hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        arch="",
        tokenizer=str(meta.get("vocab_type", "")),
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
