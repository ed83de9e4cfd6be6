"""The llama context: batches, sequences and their state, in numpy terms.

One thread owns an instance (llama.cpp contexts are not thread-safe); nothing here locks.
Semantics of the state calls: llama.cpp `src/llama-kv-cache.cpp` and `src/llama-context.cpp`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.context.adapters import Adapted, adapt
from towerd.engine.embedded.context.sequences import Buffer, Sequences
from towerd.engine.embedded.context.taps import Taps
from towerd.engine.embedded.context.zero_pages import zero_pages_returned
from towerd.errors import ModelError, TowerdError
from towerd.kernels.formats import BY_NAME
from towerd.llama_library import lib
from towerd.model.llama_log import last_errors
from towerd.model.llama_model import LlamaModel
from towerd.settings.config import Config
from towerd.tokens import Ids

_FLASH_ATTN = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
PARTIAL = int(lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
"""Flag for only the recurrent part of a hybrid's state."""
_INTERRUPTED = 2


def _ignore(_seq: int, _p: int) -> None:
    """For a context without a head."""


class DecodeError(TowerdError):
    """llama_decode refused a batch; `code` is its return value."""

    def __init__(self, code: int) -> None:
        super().__init__(f"llama_decode returned {code}: {last_errors() or 'no reason given'}")
        self.code = code


class Interrupted(TowerdError):
    """The evaluation of a batch was interrupted; see `towerd.wire.Interruption`."""

    def __init__(self) -> None:
        super().__init__("The evaluation was interrupted.")


class Batch:
    """The arrays of a llama_batch, allocated once: n_max tokens, one sequence per token."""

    def __init__(self, n_max: int) -> None:
        self.n = 0
        self.token = np.zeros(n_max, np.int32)
        self.pos = np.zeros(n_max, np.int32)
        self.seq = np.zeros(n_max, np.int32)
        self.logits = np.zeros(n_max, np.int8)
        self._n_seq = np.ones(n_max, np.int32)
        pointer = ctypes.POINTER(ctypes.c_int32)
        base, step = self.seq.ctypes.data, self.seq.itemsize
        self._seq_ptrs = (pointer * n_max)(
            *(ctypes.cast(base + i * step, pointer) for i in range(n_max))
        )
        self.raw = lib.llama_batch()
        self.raw.token = self.token.ctypes.data_as(pointer)
        self.raw.pos = self.pos.ctypes.data_as(pointer)
        self.raw.n_seq_id = self._n_seq.ctypes.data_as(pointer)
        self.raw.seq_id = self._seq_ptrs
        self.raw.logits = self.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def add(self, ids: Ids, pos: int, seq: int, *, logits_last: bool, n_last: int = 1) -> int:
        """Append a run of tokens of one sequence; returns the batch index of the last one.

        logits_last: whether logits are asked for, of the last `n_last` tokens"""
        end = self.n + len(ids)
        span = slice(self.n, end)
        self.token[span] = ids
        self.pos[span] = np.arange(pos, pos + len(ids), dtype=np.int32)
        self.seq[span] = seq
        self.logits[span] = 0
        self.logits[end - n_last : end] = logits_last
        self.n = end
        return end - 1

    def clear(self) -> None:
        self.n = 0


class LlamaContext(Sequences):
    """A unified KV cache of `n_cells` cells for `n_seqs` sequences, and the decode call."""

    def __init__(
        self,
        model: LlamaModel,
        config: Config,
        *,
        n_cells: int,
        n_seqs: int,
        taps: Taps | None = None,
    ) -> None:
        """taps: asked for each node of a graph; they live as long as the context.

        Raises ModelError when llama.cpp cannot make the context (memory, cache types), or makes one
        without a memory."""
        params = model.context_params(config)
        params.n_ctx = n_cells
        # llama.cpp aborts on a batch that cannot take one token of every sequence.
        n_batch = max(config.batch_size, n_seqs)
        n_ubatch = min(config.ubatch_size, n_batch)
        if taps is not None:  # they would have only the last part of a batch computed in parts
            n_batch = n_ubatch = max(n_ubatch, n_seqs)
        params.n_batch, params.n_ubatch = n_batch, n_ubatch
        params.n_seq_max = n_seqs
        params.flash_attn_type = _FLASH_ATTN[config.flash_attn]
        params.type_k = BY_NAME[config.cache_type_k].ggml_type
        params.type_v = BY_NAME[config.cache_type_v].ggml_type
        params.kv_unified = True
        params.swa_full = True  # else rows that slid out of a window could not be stored
        self.params = params
        """The `llama_context_params` that it was made with."""
        self._taps = taps
        if taps is not None:
            function, params.cb_eval_user_data = taps.callback
            params.cb_eval = lib.ggml_backend_sched_eval_callback(function)
        with zero_pages_returned() as buffers:
            ptr = lib.llama_init_from_model(model.ptr, params)
        self.host_buffers = buffers
        """Its buffers in main memory whose unused pages were given back."""
        if not ptr:
            raise ModelError(
                f"llama.cpp cannot make a context of {n_cells} tokens: "
                f"{last_errors() or 'no reason given'}; lower --live-tokens or --ctx-size."
            )
        super().__init__(ptr)
        self.address = int(ctypes.cast(self.ptr, ctypes.c_void_p).value or 0)
        """Address of the `llama_context`."""
        if not self._mem:
            self.close()
            raise ModelError(
                f"{model.path} keeps nothing of what it read (an embedding or diffusion model), so there is "
                "no state to continue from: serve a model that generates text from left to right."
            )
        self.n_vocab = int(lib.llama_vocab_n_tokens(model.vocab_ptr))
        self.n_cells = int(lib.llama_n_ctx(self.ptr))
        self.n_ubatch = int(lib.llama_n_ubatch(self.ptr))
        self.n_seqs = n_seqs
        self.v_trans = config.flash_attn == "off"
        self.is_tapped = taps is not None
        self.batch = Batch(n_batch)
        self._follower: Sequences | None = None
        self._changed: Callable[[int, int], None] = _ignore
        self._adapted: Adapted = ()
        self._applied: Adapted = ()

    def close(self) -> None:
        if self.ptr:
            lib.llama_free(self.ptr)
            self.ptr = None

    def decode(self) -> None:
        """Run the batch and clear it. Raises DecodeError (code 1: no free cells) and
        Interrupted."""
        self.batch.raw.n_tokens = self.batch.n
        self.batch.clear()
        self.apply_adapters()
        code = lib.llama_decode(self.ptr, self.batch.raw)
        if code == _INTERRUPTED:
            raise Interrupted
        if code != 0:
            raise DecodeError(code)

    def lead(self, follower: Sequences | None, changed: Callable[[int, int], None]) -> None:
        """Share and cut the sequences of `follower` as those of this context from now on. Rows that come
        from outside have no counterpart there. changed: is told the sequence and the position from which
        on it was cut or filled, not evaluated."""
        self._follower, self._changed = follower, changed

    def leave(self) -> None:
        """Lead no other context any more."""
        self._follower, self._changed = None, _ignore

    @property
    def evaluated(self) -> tuple[Ids, Ids, Ids]:
        """Tokens, positions and sequences of the last batch; valid until the next one is filled."""
        n, batch = int(self.batch.raw.n_tokens), self.batch
        return batch.token[:n], batch.pos[:n], batch.seq[:n]

    def apply_adapters(self) -> None:
        """Apply the adapters in force; to be called before an evaluation that bypasses `decode`."""
        if self._adapted != self._applied:
            adapt(self.ptr, self._adapted)
            self._applied = self._adapted

    @contextmanager
    def adapted(self, adapted: Adapted) -> Iterator[None]:
        """Evaluate under these LoRA adapters in the body, and under none after it. They are applied
        at the next batch; a change costs llama.cpp a new graph."""
        self._adapted = adapted
        try:
            yield
        finally:
            self._adapted = ()

    @property
    def n_threads(self) -> int:
        """Threads that evaluate a single token."""
        return int(lib.llama_n_threads(self.ptr))

    @contextmanager
    def threads(self, n: int | None) -> Iterator[None]:
        """Evaluate with `n` threads in the body; None: with the context's own number."""
        if n is None:
            yield
            return
        before = self.n_threads, int(lib.llama_n_threads_batch(self.ptr))
        lib.llama_set_n_threads(self.ptr, n, n)
        try:
            yield
        finally:
            lib.llama_set_n_threads(self.ptr, *before)

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """float32[n_vocab] view of one output row; valid until the next decode."""
        row = lib.llama_get_logits_ith(self.ptr, index)
        return np.ctypeslib.as_array(row, (self.n_vocab,))

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        super().seq_rm(seq, p0, p1)
        self._changed(seq, p0)
        if self._follower is not None:
            self._follower.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        super().seq_cp(src, dst, p0, p1)
        self._changed(dst, p0)
        if self._follower is not None:
            self._follower.seq_cp(src, dst, p0, p1)

    def set_state(self, seq: int, blob: Buffer, flags: int = 0) -> None:
        if flags != PARTIAL:
            self._changed(seq, 0)
            if self._follower is not None:
                self._follower.seq_rm(seq)
        super().set_state(seq, blob, flags)

    def save_file(self, seq: int, path: str, ids: Ids) -> None:
        """Write llama.cpp's own slot file (used by the self-test)."""
        tokens = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        if not lib.llama_state_seq_save_file(self.ptr, path.encode(), seq, tokens, len(ids)):
            raise TowerdError(f"llama.cpp cannot write a slot file to {path}.")
