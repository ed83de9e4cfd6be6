"""A GGUF of any architecture served through llama.cpp, so that the same calls give the same numbers.

llama.cpp's logits change with the batch shape, the number of threads, the CPU and the version
(DESIGN: the codec). So every step is one batch with one token of each lane, which the encoder
replays exactly as the decoder will do it; context and batch sizes are fixed, flash attention is
off, and what is left goes into `runtime`, by which a reader knows that its numbers are the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as lib
import numpy as np

from towerd.codec.errors import UnknownModel
from towerd.codec.models.base import Counts, as_counts

FAULT_ENV = "TOWERD_CODEC_FAULT"
"""`logits`: disturb the model's numbers, to test that nothing is lost when a runtime changes."""
LANES_MAX = 32
N_CTX_MAX = 1024
_FLOAT_P = ctypes.POINTER(ctypes.c_float)


class LlamaPredictor:
    """A `RuntimePredictor`. Not thread-safe; close it, or use it as a context manager."""

    window = 1

    def __init__(self, path: Path, n_threads: int = 1, lanes_max: int = LANES_MAX,
                 n_ctx: int = 0) -> None:  # fmt: skip
        """`n_ctx`: tokens per lane; 0: what the model was trained on, at most N_CTX_MAX.

        UnknownModel if the file cannot be loaded."""
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model: Any = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise UnknownModel(f"{path} cannot be loaded: it must be a GGUF with a model.")
        trained = int(lib.llama_model_n_ctx_train(self._model))
        self.n_ctx = min(n_ctx or N_CTX_MAX, trained)
        self.lanes_max = lanes_max
        self._context: Any = self._make_context(n_threads)
        vocab = lib.llama_model_get_vocab(self._model)
        self.n_tokens = int(lib.llama_vocab_n_tokens(vocab))
        self.name = _file_hash(path)
        self.runtime = self._runtime(n_threads)
        self._batch = lib.llama_batch_init(lanes_max, 0, 1)
        self._positions = [0] * lanes_max

    def reset(self) -> None:
        """Forget all texts."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        self._positions = [0] * self.lanes_max

    def restart(self, lane: int) -> None:
        """Forget one text."""
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), lane, -1, -1)
        self._positions[lane] = 0

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        """One token for each lane given; a lane that is full starts over with it."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (lane, token) in enumerate(tokens):
            if self._positions[lane] >= self.n_ctx:
                self.restart(lane)
            batch.token[i], batch.pos[i] = token, self._positions[lane]
            batch.n_seq_id[i], batch.logits[i] = 1, 1
            batch.seq_id[i][0] = lane
            self._positions[lane] += 1
        status = int(lib.llama_decode(self._context, batch))
        if status != 0:
            raise RuntimeError(f"llama.cpp cannot evaluate the codec's model (status {status}).")
        return [self._counts(i) for i in range(len(tokens))]

    def close(self) -> None:
        """Free the model."""
        if self._model:
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> LlamaPredictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _counts(self, i: int) -> Counts:
        pointer = ctypes.cast(lib.llama_get_logits_ith(self._context, i), _FLOAT_P)
        logits = np.ctypeslib.as_array(pointer, shape=(self.n_tokens,))
        if os.environ.get(FAULT_ENV) == "logits":
            logits = logits + np.float32(0.25) * np.cos(np.arange(self.n_tokens, dtype=np.float32))
        return as_counts(logits)

    def _make_context(self, n_threads: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = self.n_ctx * self.lanes_max
        params.n_batch = params.n_ubatch = self.lanes_max
        params.n_seq_max = self.lanes_max
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False
        params.no_perf = True
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise UnknownModel("llama.cpp cannot make a context for the codec's model.")
        return context

    def _runtime(self, n_threads: int) -> bytes:
        parts = (llama_cpp.__version__, lib.llama_print_system_info().decode(), np.__version__,
                 n_threads, self.n_ctx, self.lanes_max)  # fmt: skip
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def _file_hash(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()
