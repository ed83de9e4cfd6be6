"""Llama-architecture GGUFs of any shape with reproducible random weights, for tests and benches.

They know nothing, but they behave: unit-variance activations, attention that is neither uniform
nor one-hot (so a wrong key or value changes the output), a next-token distribution with a clear
but changing favourite, and no control token that is ever likely.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

from towerd.errors import ModelError
from towerd.models import templates
from towerd.models.gguf_file import begin_data, writing
from towerd.models.vocabulary import from_gguf, synthetic

FType: TypeAlias = Literal["F32", "F16", "Q8_0"]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes written, bytes in all) after each tensor."""

F32 = npt.NDArray[np.float32]
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
RMS_EPS = 1e-5
QUERY_GAIN = 2.0
"""Attention logits get this standard deviation: far from uniform, far from one-hot."""
LOGIT_STD = 3.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama model's shape. `head_dim` None is n_embd / n_head. Raises ModelError if impossible."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    head_dim: int | None = None
    n_ctx_train: int = 131072
    rope_freq_base: float = 500000.0
    ftype: FType = "Q8_0"

    def __post_init__(self) -> None:
        counts = (self.n_layer, self.n_embd, self.n_head, self.n_head_kv, self.n_ff)
        if min(counts) < 1 or self.n_ctx_train < 1:
            raise ModelError("Every dimension of a model must be at least 1.")
        if self.n_head % self.n_head_kv:
            raise ModelError("The KV heads must divide the heads.")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ModelError("The heads must divide the embedding, or give the head dimension.")
        if self.head_size % 2:
            raise ModelError("The head dimension must be even: RoPE rotates pairs.")
        if self.ftype not in get_args(FType):
            raise ModelError(f"The file type must be one of {', '.join(get_args(FType))}.")
        block = GGML_QUANT_SIZES[self.matrix_type][0]
        if any(n % block for n in (self.n_embd, self.n_ff, self.n_head * self.head_size)):
            raise ModelError(f"{self.ftype} needs row lengths that are multiples of {block}.")

    @property
    def head_size(self) -> int:
        """Values per head."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def matrix_type(self) -> GGMLQuantizationType:
        """How matrices are stored; norms are always float32."""
        return GGMLQuantizationType[self.ftype]


PRESETS = {
    "tiny": Shape(4, 256, 4, 2, 512, 512, n_ctx_train=8192, ftype="F32"),
    "small": Shape(12, 768, 12, 4, 2304, 8192, n_ctx_train=32768),
    "1b": Shape(16, 2048, 32, 8, 8192, 32000),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to be drawn: numpy `shape`, standard deviation (0: all ones, a norm's gain)."""

    name: str
    shape: tuple[int, ...]
    std: float
    type: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * block_bytes


def make_random_gguf(
    path: Path,
    shape: Shape,
    *,
    seed: int = 0,
    vocab: Path | None = None,
    chat_template: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF of `shape` to `path`, one tensor in memory at a time.

    The same arguments give the same bytes. `vocab` is a GGUF whose tokenizer is copied (and whose
    size then replaces `shape.n_vocab`); without it a synthetic one of the asked size is made. The
    template is `chat_template`, else the vocabulary's own, else ChatML. Raises ModelError.
    """
    vocabulary = synthetic(shape.n_vocab) if vocab is None else from_gguf(vocab)
    shape = replace(shape, n_vocab=len(vocabulary))
    template = chat_template or vocabulary.template or templates.CHATML
    plan = list(_plan(shape))
    n_total = sum(tensor.nbytes for tensor in plan)
    n_done = 0
    with writing(path, "llama") as writer:
        _add_metadata(writer, shape, seed)
        vocabulary.write(writer, template)
        for tensor in plan:
            _announce(writer, tensor)
        begin_data(writer)
        for tensor in plan:
            values = _draw(tensor, seed)
            if tensor.name == "output.weight":
                values[vocabulary.silent] = 0.0
            writer.write_tensor_data(_stored(values, tensor.type))
            n_done += tensor.nbytes
            if progress is not None:
                progress(n_done, n_total)


def _plan(shape: Shape) -> Iterator[_Tensor]:
    """Every tensor in file order, with the deviation that keeps activations at unit variance.

    What a layer adds to the residual stream is scaled by 1/sqrt(2 layers), so that the depth of
    the model does not drown the embedding. A SwiGLU of unit normals has variance ~0.36.
    """
    embd, ff = shape.n_embd, shape.n_ff
    q, kv = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    unit = 1 / math.sqrt(embd)
    added = 1 / math.sqrt(2 * shape.n_layer)

    def matrix(name: str, rows: int, columns: int, std: float) -> _Tensor:
        return _Tensor(f"{name}.weight", (rows, columns), std, shape.matrix_type)

    def norm(name: str) -> _Tensor:
        return _Tensor(f"{name}.weight", (embd,), 0.0, GGMLQuantizationType.F32)

    yield matrix("token_embd", shape.n_vocab, embd, 1.0)
    for layer in range(shape.n_layer):
        block = f"blk.{layer}"
        yield norm(f"{block}.attn_norm")
        yield matrix(f"{block}.attn_q", q, embd, QUERY_GAIN * unit)
        yield matrix(f"{block}.attn_k", kv, embd, unit)
        yield matrix(f"{block}.attn_v", kv, embd, unit)
        yield matrix(f"{block}.attn_output", embd, q, 2.0 * added / math.sqrt(q))
        yield norm(f"{block}.ffn_norm")
        yield matrix(f"{block}.ffn_gate", ff, embd, unit)
        yield matrix(f"{block}.ffn_up", ff, embd, unit)
        yield matrix(f"{block}.ffn_down", embd, ff, 2.0 * added / math.sqrt(ff))
    yield norm("output_norm")
    yield matrix("output", shape.n_vocab, embd, LOGIT_STD * unit)


def _draw(tensor: _Tensor, seed: int) -> F32:
    """The tensor's values: a stream of its own per name, whatever else the model holds."""
    if tensor.std == 0.0:
        return np.ones(tensor.shape, dtype=np.float32)
    digest = hashlib.blake2b(f"{seed}/{tensor.name}".encode(), digest_size=16).digest()
    stream = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    values = stream.standard_normal(tensor.shape, dtype=np.float32)
    values *= np.float32(tensor.std)
    return values


def _stored(values: F32, kind: GGMLQuantizationType) -> npt.NDArray[np.generic]:
    if kind == GGMLQuantizationType.F32:
        return values
    return quants.quantize(values, kind)


def _announce(writer: GGUFWriter, tensor: _Tensor) -> None:
    dtype = np.dtype(np.float32)
    writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.nbytes, tensor.type)


def _add_metadata(writer: GGUFWriter, shape: Shape, seed: int) -> None:
    writer.add_name(f"random-{shape.n_layer}x{shape.n_embd}-{shape.ftype}-seed{seed}")
    writer.add_description("Random weights; made by towerctl model random")
    writer.add_file_type(FILE_TYPES[shape.ftype])
    writer.add_quantization_version(2)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_freq_base)
