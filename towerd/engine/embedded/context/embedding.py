"""Embeddings and rerank scores, from a context separate from the one for chats.

Nothing is kept: each text is evaluated alone, as a whole, and forgotten. See `send_embedding` and
`send_rerank` in llama.cpp's tools/server/server-context.cpp.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.context.adapters import Adapted, Adapters, adapt
from towerd.engine.embedded.context.context import Batch
from towerd.errors import ContextExceeded, ModelError, TowerdError
from towerd.llama_library import lib
from towerd.model.llama_log import last_errors
from towerd.model.llama_model import LlamaModel
from towerd.settings.config import Config
from towerd.tokens import Ids

Rows = npt.NDArray[np.float32]
POOLINGS = {
    "none": lib.LLAMA_POOLING_TYPE_NONE,
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
    "rank": lib.LLAMA_POOLING_TYPE_RANK,
}
_BY_TYPE = {number: name for name, number in POOLINGS.items()}
_MAX_ABS_RANGE = 32760.0  # of an int16


class Embedder:
    """A context of the loaded model that gives rows instead of tokens. Make it at start-up. Any
    thread may use it."""

    def __init__(self, model: LlamaModel, config: Config, n_ctx: int, adapters: Adapters) -> None:
        """Raises ModelError when llama.cpp cannot make the context."""
        self.n_ctx = n_ctx
        self._adapters = adapters
        self._applied: Adapted = ()
        self._n_batch = min(max(config.batch_size, config.ubatch_size), n_ctx)
        if config.ubatch_size < self._n_batch:  # a pooled text is one computation
            self._n_batch = config.ubatch_size
        params = model.context_params(config)
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, self._n_batch, self._n_batch
        params.n_seq_max = 1
        params.embeddings = True
        if config.pooling is not None:
            params.pooling_type = POOLINGS[config.pooling]
        if config.reranking:
            params.pooling_type = POOLINGS["rank"]
        self._ptr: Any = lib.llama_init_from_model(model.ptr, params)
        if not self._ptr:
            raise ModelError(
                f"llama.cpp cannot make a context for embeddings: {last_errors() or 'no reason'}."
            )
        self._n_embd = int(lib.llama_model_n_embd_out(model.ptr))
        self._memory = lib.llama_get_memory(self._ptr)
        self._batch = Batch(self._n_batch)
        self._thread = ThreadPoolExecutor(1, "towerd-embed")
        self.n_decodes = 0
        self.pooling = _BY_TYPE.get(int(lib.llama_pooling_type(self._ptr)), "none")
        """none, mean, cls, last or rank: what is made of the rows of a text's tokens."""

    def close(self) -> None:
        """Free the context. What waits is cancelled."""
        self._thread.shutdown(cancel_futures=True)
        lib.llama_free(self._ptr)

    def embed(self, ids: Ids, normalize: int) -> Future[Rows]:
        """See `Embeds`."""
        return self._thread.submit(self._embed, ids, normalize)

    def score(self, ids: Ids) -> Future[float]:
        """See `Embeds`."""
        return self._thread.submit(lambda: float(self._rows(ids)[0, 0]))

    def _embed(self, ids: Ids, normalize: int) -> Rows:
        rows = self._rows(ids)
        return rows if self.pooling == "none" else normalized(rows, normalize)

    def _rows(self, ids: Ids) -> Rows:
        """float32[1 or n, n_embd]."""
        if len(ids) > self.n_ctx:
            raise ContextExceeded(
                f"input ({len(ids)} tokens) is larger than the max context size "
                f"({self.n_ctx} tokens). skipping",
                n_prompt_tokens=len(ids),
                n_ctx=self.n_ctx,
            )
        if len(ids) > self._n_batch:
            raise TowerdError(
                f"input ({len(ids)} tokens) is too large to process. increase the physical batch "
                f"size (current batch size: {self._n_batch})"
            )
        if (adapted := self._adapters.adapted(self._adapters.scope(""))) != self._applied:
            adapt(self._ptr, adapted)
            self._applied = adapted
        if self._memory:
            lib.llama_memory_clear(self._memory, True)
        self._batch.clear()
        self._batch.add(ids, 0, 0, logits_last=True)
        self._batch.logits[: len(ids)] = 1
        self._batch.raw.n_tokens = len(ids)
        if (code := lib.llama_decode(self._ptr, self._batch.raw)) != 0:
            raise TowerdError(f"The text could not be evaluated: llama_decode returned {code}.")
        self.n_decodes += 1
        if self.pooling == "none":
            each = [lib.llama_get_embeddings_ith(self._ptr, i) for i in range(len(ids))]
        else:
            each = [lib.llama_get_embeddings_seq(self._ptr, 0)]
        width = 1 if self.pooling == "rank" else self._n_embd
        return np.array([_copied(pointer, width) for pointer in each], np.float32)


def normalized(rows: Rows, kind: int) -> Rows:
    """`common_embd_normalize` of llama.cpp: -1 none, 0 by the largest, 2 Euclidean, else that
    norm."""
    wide = np.abs(rows.astype(np.float64))
    if kind == -1:
        return rows
    if kind == 0:
        sums = wide.max(axis=1) / _MAX_ABS_RANGE
    else:
        sums = (wide**kind).sum(axis=1) ** (1.0 / kind)
    factors = np.divide(1.0, sums, out=np.zeros_like(sums), where=sums > 0)
    return np.asarray(rows * factors[:, None], np.float32)


def _copied(pointer: Any, n: int) -> Rows:
    if not pointer:
        return np.zeros(n, np.float32)
    row = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
    return np.array(np.ctypeslib.as_array(row, (n,)), np.float32)
