"""What the header of a GGUF says about serving it, read without its weights in some milliseconds."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from towerd.errors import ModelError
from towerd.model.gguf_keys import GgufKeys
from towerd.models.hub.file_names import parts_of

Memory: TypeAlias = Literal["dense", "window", "hybrid", "recurrent"]
"""What a model keeps of its context: rows of all layers; in some layers those of the last tokens;
a state beside rows; a state alone."""

STATE_KEYS = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "wkv.head_size",
    "shortconv.l_cache",
    "kda.head_dim",
)
"""Metadata that architectures with recurrent layers have."""
WINDOWED_UNSAID = ("gemma2", "llama4", "smallthinker")
"""Architectures whose layers have windows even if no key gives their size."""
UNUSED_WINDOW = ("phi3",)
"""Architectures whose windows llama.cpp does not use."""
NO_MODEL_TYPES = ("mmproj", "adapter", "imatrix")
"""Values of `general.type` of what is not a model."""
F16_BYTES = 2
LAYERS_MAX = 4096
"""Far more than any model has."""
MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class Header:
    """A whole model, whose every file is as large as its tensors say."""

    arch: str
    title: str
    memory: Memory
    n_ctx_train: int
    """0 if the file does not say."""
    token_bytes: int
    """Size of the rows of one token in f16, of the layers that keep rows of all tokens."""
    weight_bytes: int
    """The sizes of its files."""
    n_tensors: int
    has_chat_template: bool
    is_model: bool
    """Whether it generates text: not a projector, adapter or importance matrix."""


def read_header(path: Path) -> Header:
    """The header of the model whose first file is `path`. Raises ModelError if a file is missing,
    cut short, not a GGUF, or says what no model has."""
    n_bytes = n_tensors = 0
    header: dict[str, Any] = {}
    for part in parts_of(path):
        with closing(_opened(part)) as keys:
            if shortage := keys.shortage():
                raise ModelError(f"{part} {shortage}; fetch it again.")
            n_bytes, n_tensors = n_bytes + part.stat().st_size, n_tensors + keys.n_tensors
            if part == path:
                header = _described(keys)
    return Header(**header, weight_bytes=n_bytes, n_tensors=n_tensors)


def _opened(path: Path) -> GgufKeys:
    try:
        with path.open("rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        return GgufKeys(path)
    except ValueError as error:
        why = "is damaged" if is_gguf else "is not a GGUF file"
        raise ModelError(f"{path} {why}; fetch or convert it again.") from error


def _described(keys: GgufKeys) -> dict[str, Any]:
    arch = str(keys.get("general.architecture", ""))
    return {
        "arch": arch,
        "title": str(keys.get("general.name", "")),
        "memory": _memory(keys, arch),
        "n_ctx_train": keys.count(f"{arch}.context_length"),
        "token_bytes": _token_bytes(keys, arch),
        "has_chat_template": bool(keys.get("tokenizer.chat_template", "")),
        "is_model": bool(arch)
        and arch != "clip"
        and keys.get("general.type") not in NO_MODEL_TYPES,
    }


def _memory(keys: GgufKeys, arch: str) -> Memory:
    if arch.startswith("rwkv") or any(keys.get(f"{arch}.{key}") is not None for key in STATE_KEYS):
        n_head = keys.count(f"{arch}.attention.head_count")
        return "hybrid" if n_head and not arch.startswith("rwkv") else "recurrent"
    window = keys.count(f"{arch}.attention.sliding_window")
    has_window = window > 0 or arch in WINDOWED_UNSAID
    return "window" if has_window and arch not in UNUSED_WINDOW else "dense"


def _token_bytes(keys: GgufKeys, arch: str) -> int:
    n_layer = keys.count(f"{arch}.block_count", high=LAYERS_MAX)
    n_head = keys.count(f"{arch}.attention.head_count")
    n_kv = keys.counts(f"{arch}.attention.head_count")
    if keys.get(f"{arch}.attention.head_count_kv") is not None:
        n_kv = keys.counts(f"{arch}.attention.head_count_kv")
    step = keys.count(f"{arch}.full_attention_interval", 1) or 1
    n_rows = (n_kv[0] * n_layer if len(n_kv) == 1 else sum(n_kv)) // step
    n_embd = keys.count(f"{arch}.embedding_length")
    head = keys.count(f"{arch}.attention.key_length", n_embd // max(1, n_head))
    value = keys.count(f"{arch}.attention.value_length", head)
    return n_rows * (head + value) * F16_BYTES
