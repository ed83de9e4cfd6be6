"""LoRA adapters: which are loaded, their scales, and those that a scope's rows are computed under.

As in llama-server, each has a number, by the order of the command line, and a scale for all
requests that POST /lora-adapters may change. A request may name scales of its own; those it does
not name are 0. The adapters of a request are part of its scope (`towerd.store.tree.scope`), by
the hashes of their files, so that a restart with other adapters or in another order uses no wrong
row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from towerd.errors import InvalidRequest, ModelError
from towerd.llama_library import lib
from towerd.model.llama_log import last_errors
from towerd.model.llama_model import LlamaModel
from towerd.model.model_file import Memo, file_hash
from towerd.settings.llama_flags import AdapterFile
from towerd.store.tree.scope import adapters_of, scope_of

Adapted: TypeAlias = tuple[tuple[int, float], ...]
"""Addresses of `llama_adapter_lora`, with their scales; empty: the bare model."""
ENTRIES_MAX = 8192
_HASH_CHARS = 16
_META_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Adapter:
    """One loaded file."""

    path: Path
    hash: str
    address: int
    """Address of the `llama_adapter_lora`, which lives as long as the model."""
    task_name: str
    prompt_prefix: str


class Adapters:
    """The loaded adapters. Any thread may use it."""

    def __init__(self, loaded: Sequence[Adapter], scales: Sequence[float]) -> None:
        self._loaded = tuple(loaded)
        self._scales = tuple(scales)

    def listing(self) -> list[dict[str, Any]]:
        """What GET /lora-adapters answers."""
        return [
            {
                "id": i,
                "path": str(adapter.path),
                "scale": scale,
                "task_name": adapter.task_name,
                "prompt_prefix": adapter.prompt_prefix,
            }
            for i, (adapter, scale) in enumerate(zip(self._loaded, self._scales, strict=True))
        ]

    def set_scales(self, asked: Sequence[Any]) -> None:
        """Set the scales of requests from now on. Raises InvalidRequest."""
        self._scales = self._read(asked)

    def scope(self, tenant: str, asked: object = None) -> str:
        """The scope of a request of `tenant`; asked: its field `lora`. Raises InvalidRequest."""
        if asked is not None and not isinstance(asked, list):
            raise InvalidRequest("'lora' must be an array of objects with 'id' and 'scale' fields")
        scales = self._read(asked) if asked else self._scales
        named = (
            f"{adapter.hash}@{np.float32(scale)}"
            for adapter, scale in zip(self._loaded, scales, strict=True)
            if scale
        )
        return scope_of(tenant, ",".join(named))

    def has(self, scope: str) -> bool:
        """Whether the adapters of a scope are loaded."""
        known = {adapter.hash for adapter in self._loaded}
        return all(part.partition("@")[0] in known for part in _parts(scope))

    def adapted(self, scope: str) -> Adapted:
        """The adapters that rows of `scope` are computed under. Raises InvalidRequest if one is not
        loaded."""
        if not self.has(scope):
            raise InvalidRequest("A LoRA adapter of this conversation is not loaded: see --lora.")
        addresses = {adapter.hash: adapter.address for adapter in self._loaded}
        found = [part.partition("@") for part in _parts(scope)]
        return tuple((addresses[hash], float(scale)) for hash, _, scale in found)

    def _read(self, asked: Sequence[Any]) -> tuple[float, ...]:
        """One scale for each loaded adapter. Like llama-server, skips entries that it cannot
        read."""
        if len(asked) > ENTRIES_MAX:
            raise InvalidRequest(f"at most {ENTRIES_MAX} LoRA adapters can be named")
        scales = [0.0] * len(self._loaded)
        for entry in asked:
            at, scale = _number(entry, "id", -1), _number(entry, "scale", 0.0)
            if not math.isfinite(np.float32(scale)):
                raise InvalidRequest("the scale of a LoRA adapter must be a finite number")
            if 0 <= at < len(scales):
                scales[int(at)] = scale
        return tuple(scales)


def load_adapters(
    model: LlamaModel, files: Sequence[AdapterFile], memo: Memo, *, applied: bool
) -> Adapters:
    """Load the files for a model. applied: with the scales they are given, else with 0.

    Raises ModelError: a file that cannot be read, is no adapter, or is one of another model."""
    loaded = [_load(model, Path(file.path).expanduser(), memo) for file in files]
    return Adapters(loaded, [file.scale if applied else 0.0 for file in files])


def _load(model: LlamaModel, path: Path, memo: Memo) -> Adapter:
    hash = file_hash(path, memo)
    handle = lib.llama_adapter_lora_init(model.ptr, str(path).encode())
    address = ctypes.cast(handle, ctypes.c_void_p).value if handle else None
    if address is None:
        why = last_errors() or "llama.cpp gives no reason"
        raise ModelError(f"{path} cannot be loaded as a LoRA adapter of {model.path.name}: {why}.")
    if lib.llama_adapter_get_alora_n_invocation_tokens(handle):
        raise ModelError(
            f"{path} is an activated LoRA (aLoRA), which the embedded engine does not apply: leave "
            "it out, or use --engine llama-server."
        )
    names = [_meta(handle, f"adapter.lora.{name}") for name in ("task_name", "prompt_prefix")]
    return Adapter(path, hash[:_HASH_CHARS], address, *names)


def adapt(context: Any, adapted: Adapted) -> None:
    """Evaluate what comes next in a `llama_context` under these adapters."""
    n = len(adapted)
    pointer = lib.llama_adapter_lora_p_ctypes
    addresses = (pointer * n)(*(ctypes.cast(address, pointer) for address, _ in adapted))
    scales = (ctypes.c_float * n)(*(scale for _, scale in adapted))
    lib.llama_set_adapters_lora(context, addresses, n, scales)


def _parts(scope: str) -> list[str]:
    text = adapters_of(scope)
    return text.split(",") if text else []


def _meta(handle: Any, key: str) -> str:
    value = ctypes.create_string_buffer(_META_BYTES)
    lib.llama_adapter_meta_val_str(handle, key.encode(), value, _META_BYTES)
    return value.value.decode("utf-8", "replace")


def _number(entry: object, name: str, default: float) -> float:
    value = entry.get(name, default) if isinstance(entry, dict) else default
    try:
        return float(value) if isinstance(value, int | float) else default
    except OverflowError:
        return math.inf
