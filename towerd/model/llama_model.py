"""The model file in memory: loading, metadata, and what its row identity needs.

The only objects that touch `llama_model*`. Loading failures become `ModelError` with the reason
llama.cpp logged, because its API itself returns only NULL.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towerd.errors import ConfigError, ModelError
from towerd.llama_library import lib
from towerd.model.llama_log import forget_errors, last_errors, route_log
from towerd.model.loadable import check_loadable, why_not_loaded
from towerd.model.model_file import open_parts
from towerd.model.row_flags import row_overrides
from towerd.models.known import metadata_of
from towerd.settings.config import Config
from towerd.settings.llama_flags import words_of

if TYPE_CHECKING:  # imported when there are such flags: most command lines have none
    from towerd.wire import LoadFlags

_GGUF_MAGIC = b"GGUF"
_MROPE_TYPES = (8, 24, 40)  # GGML_ROPE_TYPE_MROPE, _VISION, _IMROPE: more than one position a cell
_COMPRESSED = ("deepseek4",)
_META_VALUE_BYTES = 1 << 20
_ROPE_KEYS = (
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
)

_PROGRESS_STEP = 0.01
"""Shares of the loading that are closer to each other are not told: llama.cpp tells one for each
tensor."""

_backend_lock = threading.Lock()
_backend_ready = False


def init_backend() -> None:
    """Initialise llama.cpp once per process, and route its log into ours."""
    global _backend_ready
    with _backend_lock:
        route_log()
        if not _backend_ready:
            lib.llama_backend_init()
            _backend_ready = True


class LoadProgress:
    """What llama.cpp calls while it loads. It must live until the weights are loaded. The whole is
    not told: a model is loaded when requests are answered."""

    def __init__(self, pipe: int) -> None:
        """pipe: gets a line of JSON, `{"progress": 0.5}`, for each share. At most a hundred short
        lines: they fit into a pipe that nobody reads."""
        self._pipe = pipe
        self._told = 0.0
        self.callback: Any = lib.llama_progress_callback(self._on_progress)

    def _on_progress(self, share: float, _user: Any) -> bool:
        if self._told + _PROGRESS_STEP <= share < 1.0:
            self._told = share
            try:
                os.write(self._pipe, json.dumps({"progress": round(share, 4)}).encode() + b"\n")
            except OSError:  # the router has ended, and this process is about to
                pass
        return True  # go on loading


class LlamaModel:
    """A loaded GGUF. Free it with `close()` after every context made from it."""

    def __init__(self, path: Path, config: Config, *, vocab_only: bool = False) -> None:
        """vocab_only: tokenizer and metadata without the weights, in milliseconds.

        Raises ModelError: missing, not a GGUF, truncated, unknown to this llama.cpp, or one that
        cannot be served. Raises ConfigError: llama.cpp does not take the value of a flag."""
        _check_magic(path)
        init_backend()
        check_loadable(path)
        self.flags: LoadFlags | None = take_load_flags(config)
        """What llama-server's flags say about this model and its contexts; None: nothing."""
        params = lib.llama_model_default_params()
        if self.flags is not None:
            self.flags.apply_to_model(ctypes.addressof(params))
        params.n_gpu_layers = config.gpu_layers
        params.load_mode = _load_mode(config)
        params.vocab_only = vocab_only
        params.load_mtp = _asks_for_head(config)
        if config.progress_fd is not None:
            progress = LoadProgress(config.progress_fd)
            params.progress_callback = progress.callback
        forget_errors()
        self.files = open_parts(path)
        """Opened before its weights were read; not identified yet."""
        handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if not handle:
            self._close_files()
            raise ModelError(why_not_loaded(path, last_errors()))
        self.path = path
        self.ptr: Any = handle
        self.vocab_ptr: Any = lib.llama_model_get_vocab(handle)
        self.metadata = {**self._read_metadata(), **metadata_of(path)}
        self.vocab_only = vocab_only
        if not lib.llama_model_has_decoder(handle) or lib.llama_model_has_encoder(handle):
            self.close()
            raise ModelError(
                f"{path} has an encoder, whose state towerd does not keep: serve a decoder-only "
                "model."
            )

    def close(self) -> None:
        """Free the weights."""
        if self.ptr:
            lib.llama_model_free(self.ptr)
            self.ptr = None
            self._close_files()

    def _close_files(self) -> None:
        for file in self.files:
            file.close()

    @property
    def address(self) -> int:
        """The address of the `llama_model`, as towerd.wire takes it."""
        return int(ctypes.cast(self.ptr, ctypes.c_void_p).value or 0)

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return self.metadata.get("general.architecture", "")

    @property
    def n_ctx_train(self) -> int:
        if self.vocab_only:
            return int(self.key("context_length", "0"))
        return int(lib.llama_model_n_ctx_train(self.ptr))

    @property
    def n_embd(self) -> int:
        if self.vocab_only:
            return int(self.key("embedding_length", "0"))
        return int(lib.llama_model_n_embd(self.ptr))

    def context_params(self, config: Config) -> Any:
        """A `llama_context_params` with the threads and the RoPE of `config` and of the flags."""
        params = lib.llama_context_default_params()
        params.n_threads = config.threads
        params.n_threads_batch = config.threads_batch or config.threads
        params.offload_kqv = config.gpu_layers != 0
        params.no_perf = True
        if self.flags is not None:
            self.flags.apply_to_context(ctypes.addressof(params))
        if config.rope_freq_base:
            params.rope_freq_base = config.rope_freq_base
        if config.rope_freq_scale:
            params.rope_freq_scale = config.rope_freq_scale
        return params

    @property
    def n_head(self) -> int:
        """Query heads of the widest layer."""
        return int(lib.llama_model_n_head(self.ptr))

    @property
    def n_params(self) -> int:
        return int(lib.llama_model_n_params(self.ptr))

    @property
    def size_bytes(self) -> int:
        return int(lib.llama_model_size(self.ptr))

    @property
    def n_swa(self) -> int:
        return int(lib.llama_model_n_swa(self.ptr))

    def key(self, name: str, default: str = "") -> str:
        """The metadata value of `{arch}.{name}`."""
        return self.metadata.get(f"{self.arch}.{name}", default)

    @property
    def is_recurrent(self) -> bool:
        """Recurrent layers only."""
        return bool(lib.llama_model_is_recurrent(self.ptr))

    @property
    def is_hybrid(self) -> bool:
        """Recurrent layers and attention."""
        return bool(lib.llama_model_is_hybrid(self.ptr))

    @property
    def is_compressed(self) -> bool:
        """Whether attention keeps compressed keys beside its rows."""
        return self.arch in _COMPRESSED

    @property
    def has_indexer(self) -> bool:
        """Whether attention keeps an index or compressed keys beside its rows."""
        return self.is_compressed or any(".indexer." in key for key in self.metadata)

    @property
    def has_cell_ext(self) -> bool:
        """Whether every cell carries more than a position: models with M-RoPE."""
        return int(lib.llama_model_rope_type(self.ptr)) in _MROPE_TYPES

    def rope(self, config: Config) -> dict[str, str]:
        """The RoPE parameters in force, as text, for the row identity."""
        rope = {name: value for name in _ROPE_KEYS if (value := self.key(name))}
        rope["type"] = str(int(lib.llama_model_rope_type(self.ptr)))
        if config.rope_freq_base:
            rope["override.freq_base"] = repr(config.rope_freq_base)
        if config.rope_freq_scale:
            rope["override.freq_scale"] = repr(config.rope_freq_scale)
        return rope | row_overrides(config.load_words, {})

    def is_long_context(self, n_ctx_seq: int) -> bool:
        """Whether llama.cpp picks the long RoPE factors (longrope) for this context size."""
        if self.key("rope.scaling.type") != "longrope":
            return False
        original = self.key("rope.scaling.original_context_length")
        return n_ctx_seq > (int(original) if original else self.n_ctx_train)

    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.ptr, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    def _read_metadata(self) -> dict[str, str]:
        out: dict[str, str] = {}
        value = ctypes.create_string_buffer(_META_VALUE_BYTES)
        key = ctypes.create_string_buffer(512)
        for i in range(lib.llama_model_meta_count(self.ptr)):
            if lib.llama_model_meta_key_by_index(self.ptr, i, key, 512) < 0:
                continue
            if lib.llama_model_meta_val_str_by_index(self.ptr, i, value, _META_VALUE_BYTES) >= 0:
                out[key.value.decode("utf-8", "replace")] = value.value.decode("utf-8", "replace")
        return out


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"Cannot read the model {path}: {error.strerror}.") from error
    if magic != _GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file; convert the model to GGUF first.")


def _load_mode(config: Config) -> int:
    if config.mlock:
        return int(lib.LLAMA_LOAD_MODE_MMAP_MLOCK if config.mmap else lib.LLAMA_LOAD_MODE_MLOCK)
    return int(lib.LLAMA_LOAD_MODE_AUTO if config.mmap else lib.LLAMA_LOAD_MODE_NONE)


def take_load_flags(config: Config) -> LoadFlags | None:
    """The flags of `config`, with the NUMA strategy among them in force; None: there are none.

    Call it after llama.cpp's backend was initialised. Raises ConfigError: a value that llama.cpp does not take."""
    words = config.load_words
    if not words:
        return None
    flags = _read(words)
    if flags.numa:
        lib.llama_numa_init(flags.numa)
    return flags


def _asks_for_head(config: Config) -> bool:
    """Whether drafts are to come from the model's heads that predict several tokens: else their weights
    are left out."""
    words = words_of(config.llama_server_args, "wire")
    types = (value for flag, value in pairwise(words) if flag == "--spec-type")
    return any("draft-mtp" in value.split(",") for value in types)


def check_reply_flags(config: Config) -> None:
    """Read the flags about replies, which are used once the model is loaded. Raises ConfigError: a
    value that llama.cpp does not take."""
    words = words_of(config.llama_server_args, "wire")
    if words:
        _read(words)


def _read(words: list[str]) -> LoadFlags:
    from towerd.wire import LoadFlags

    try:
        return LoadFlags(words)
    except RuntimeError as error:
        said = " ".join(str(error).split()).rstrip(" .")
        raise ConfigError(f"llama.cpp refuses a flag: {said}.") from error
