"""llama.cpp's own distribution of the next token, of several texts side by side."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.llama_library import lib

_FLOAT_P = ctypes.POINTER(ctypes.c_float)


class LlamaReader:
    """A model that reads `n_lanes` texts, one token of each at a time. A context manager."""

    def __init__(self, path: Path, n_lanes: int) -> None:
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model: Any = lib.llama_model_load_from_file(str(path).encode(), model_params)
        assert self._model, path
        params = lib.llama_context_default_params()
        params.n_ctx = int(lib.llama_model_n_ctx_train(self._model)) * n_lanes
        params.n_batch = params.n_ubatch = params.n_seq_max = n_lanes
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False
        self._context: Any = lib.llama_init_from_model(self._model, params)
        vocab = lib.llama_model_get_vocab(self._model)
        self.n_tokens = int(lib.llama_vocab_n_tokens(vocab))
        self._batch = lib.llama_batch_init(n_lanes, 0, 1)
        self._n_read = [0] * n_lanes

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.float64]]:
        """One (lane, token) of each lane; the chances of what follows each: [n_tokens]."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (lane, token) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self._n_read[lane]
            batch.n_seq_id[i], batch.logits[i] = 1, 1
            batch.seq_id[i][0] = lane
            self._n_read[lane] += 1
        assert lib.llama_decode(self._context, batch) == 0
        return [self._chances(i) for i in range(len(tokens))]

    def _chances(self, i: int) -> npt.NDArray[np.float64]:
        pointer = ctypes.cast(lib.llama_get_logits_ith(self._context, i), _FLOAT_P)
        logits = np.ctypeslib.as_array(pointer, shape=(self.n_tokens,)).astype(np.float64)
        weights = np.exp(logits - logits.max())
        chances: npt.NDArray[np.float64] = weights / weights.sum()
        return chances

    def __enter__(self) -> LlamaReader:
        return self

    def __exit__(self, *_: object) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)
