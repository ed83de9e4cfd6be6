"""Real llama.cpp contexts over tiny models, and the blobs they write."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter

from lab.models.gguf_file import writing
from lab.models.random_gguf import Shape, make_random_gguf
from lab.models.vocabulary import synthetic

N_VOCAB = 448
OpenContext = Callable[..., "Context"]


class Context:
    """A llama.cpp context through the low-level API: decode, and sequence states as bytes."""

    def __init__(
        self,
        model: Any,
        *,
        k: int = 1,
        v: int = 1,
        v_trans: bool = False,
        unified: bool = True,
        n_seq: int = 8,
        n_ctx: int = 512,
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx if unified else n_ctx * n_seq
        params.n_seq_max, params.kv_unified = n_seq, unified
        params.n_batch = params.n_ubatch = 256
        params.n_threads = params.n_threads_batch = 1
        params.type_k, params.type_v = k, v
        params.flash_attn_type = 0 if v_trans else 1
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        assert self.ctx
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(self, ids: Iterable[int], p0: int, seq: int = 0) -> npt.NDArray[np.float32]:
        """Decode `ids` at positions from `p0`; returns the logits after the last."""
        ids = list(ids)
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = int(token), p0 + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = i == len(ids) - 1
        assert llama_cpp.llama_decode(self.ctx, batch) == 0
        llama_cpp.llama_batch_free(batch)
        logits = llama_cpp.llama_get_logits_ith(self.ctx, -1)
        return np.ctypeslib.as_array(logits, (self.n_vocab,)).copy()

    def blob(self, seq: int = 0) -> bytes:
        """The sequence's state."""
        size = llama_cpp.llama_state_seq_get_size(self.ctx, seq)
        buffer = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(self.ctx, buffer, size, seq) == size
        return bytes(buffer)

    def restore(self, blob: Any, seq: int = 0) -> bool:
        """Load a state; True if llama.cpp took every byte."""
        data = bytearray(blob)
        buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
        taken = llama_cpp.llama_state_seq_set_data(self.ctx, buffer, len(data), seq)
        return bool(taken == len(data))

    def save_file(self, path: Path, ids: Sequence[int], seq: int = 0) -> bytes:
        """The sequence's slot file with a plain token list."""
        tokens = (llama_cpp.llama_token * len(ids))(*map(int, ids))
        name = str(path).encode()
        assert llama_cpp.llama_state_seq_save_file(self.ctx, name, seq, tokens, len(ids)) > 0
        return path.read_bytes()

    def copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        llama_cpp.llama_memory_seq_cp(self.memory, src, dst, p0, p1)

    def remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        assert llama_cpp.llama_memory_seq_rm(self.memory, seq, p0, p1)

    def close(self) -> None:
        llama_cpp.llama_free(self.ctx)


@pytest.fixture(scope="session")
def ids() -> npt.NDArray[np.int32]:
    """64 ordinary token ids."""
    return np.random.default_rng(5).integers(270, N_VOCAB, 64, dtype=np.int32)


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models: `llama` (head dimension 64), `mrope` (cells with an extension) and
    `mla` (no V)."""
    folder = tmp_path_factory.mktemp("models")
    paths = {name: folder / f"{name}.gguf" for name in ("llama", "mrope", "mla")}
    shape = Shape(2, 128, 2, 1, 128, N_VOCAB, head_dim=64, ftype="F32", n_ctx_train=4096)
    make_random_gguf(paths["llama"], shape)
    _write_mrope(paths["mrope"])
    _write_mla(paths["mla"])
    return paths


@pytest.fixture(scope="session")
def models(model_paths: dict[str, Path]) -> Iterator[dict[str, Any]]:
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    if not os.environ.get("TOWERD_TEST_LLAMA_LOG"):
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    loaded = {
        name: llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        for name, path in model_paths.items()
    }
    assert all(loaded.values())
    yield loaded
    for model in loaded.values():
        llama_cpp.llama_model_free(model)
    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(0), ctypes.c_void_p(0))


@pytest.fixture
def open_context(models: dict[str, Any]) -> Iterator[OpenContext]:
    """Open contexts over a tiny model; they are closed at the end of the test."""
    opened: list[Context] = []

    def open_(model: str = "llama", **options: Any) -> Context:
        opened.append(Context(models[model], **options))
        return opened[-1]

    yield open_
    for context in opened:
        context.close()


@pytest.fixture(scope="session")
def real_blobs(models: dict[str, Any], ids: npt.NDArray[np.int32]) -> dict[str, tuple[bytes, bool]]:
    """Small blobs of every shape of state: name -> (blob, has cell extension)."""
    options: dict[str, dict[str, Any]] = {
        "f16": {},
        "q8_0": {"k": 8, "v": 8},
        "v_trans": {"v_trans": True},
        "streams": {"unified": False, "n_seq": 3},
        "permuted": {},
        "mrope": {"model": "mrope"},
        "mla": {"model": "mla"},
    }
    blobs = {}
    for name, option in options.items():
        context = Context(models[option.pop("model", "llama")], **option)
        context.decode(ids[:7], 0)
        if name == "permuted":
            context.restore(context.blob(), 1)
            context.remove(0, 0, 4)
            context.copy(1, 0, 0, 4)
        blobs[name] = (context.blob(), name == "mrope")
        context.close()
    return blobs


def _write_mrope(path: Path) -> None:
    """A qwen2vl of two layers, head dimension 64."""
    with writing(path, "qwen2vl") as writer:
        _add_common(writer, n_head=2, n_head_kv=1)
        writer.add_rope_dimension_sections([16, 8, 8, 0])
        draw = _Tensors(writer)
        for i in range(2):
            draw(f"blk.{i}.attn_q.weight", 128, 128)
            draw(f"blk.{i}.attn_k.weight", 64, 128)
            draw(f"blk.{i}.attn_v.weight", 64, 128)
            draw(f"blk.{i}.attn_output.weight", 128, 128)
            for name, n in (("q", 128), ("k", 64), ("v", 64)):
                draw(f"blk.{i}.attn_{name}.bias", n)
        draw.common()


def _write_mla(path: Path) -> None:
    """A dense deepseek2 of two layers: 2 heads, latent of 64, 32 roped dimensions."""
    with writing(path, "deepseek2") as writer:
        _add_common(writer, n_head=2, n_head_kv=1)
        writer.add_leading_dense_block_count(2)
        writer.add_expert_count(2)
        writer.add_expert_used_count(1)
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(64)
        writer.add_expert_weights_scale(1.0)
        writer.add_q_lora_rank(64)
        writer.add_kv_lora_rank(64)
        writer.add_key_length(96)
        writer.add_value_length(64)
        writer.add_key_length_mla(64)
        writer.add_value_length_mla(32)
        writer.add_rope_dimension_count(32)
        draw = _Tensors(writer)
        for i in range(2):
            draw(f"blk.{i}.attn_q_a_norm.weight", 64)
            draw(f"blk.{i}.attn_kv_a_norm.weight", 64)
            draw(f"blk.{i}.attn_q_a.weight", 64, 128)
            draw(f"blk.{i}.attn_q_b.weight", 2 * 64, 64)
            draw(f"blk.{i}.attn_kv_a_mqa.weight", 96, 128)
            draw(f"blk.{i}.attn_k_b.weight", 2, 64, 32)
            draw(f"blk.{i}.attn_v_b.weight", 2, 32, 64)
            draw(f"blk.{i}.attn_output.weight", 128, 64)
        draw.common()


def _add_common(writer: GGUFWriter, *, n_head: int, n_head_kv: int) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(128)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(N_VOCAB)
    synthetic(N_VOCAB).write(writer, None)


class _Tensors:
    """Adds random float32 tensors to a writer, always the same ones."""

    def __init__(self, writer: GGUFWriter) -> None:
        self.writer = writer
        self.random = np.random.default_rng(1)

    def __call__(self, name: str, *shape: int) -> None:
        if len(shape) == 1 and not name.endswith("bias"):
            values = np.ones(shape, np.float32)
        else:
            values = self.random.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
        self.writer.add_tensor(name, values.astype(np.float32))

    def common(self) -> None:
        """The tensors that every architecture here has."""
        self("token_embd.weight", N_VOCAB, 128)
        self("output_norm.weight", 128)
        self("output.weight", N_VOCAB, 128)
        for i in range(2):
            self(f"blk.{i}.attn_norm.weight", 128)
            self(f"blk.{i}.ffn_norm.weight", 128)
            for name in ("gate", "up", "down"):
                self(f"blk.{i}.ffn_{name}.weight", 128, 128)
