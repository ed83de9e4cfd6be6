"""Makes GGUFs of any shape and many architectures with reproducible random weights, for tests and
benchmarks.

They know nothing, but they behave realistically: activations have unit variance, attention is
neither uniform nor one-hot (so a wrong key or value changes the output), the next-token
distribution has a clear but changing favourite, and control tokens are never likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

from lab.models import heads, templates
from lab.models.architectures import ARCHITECTURES, NORM_EPS, layer_tensors
from lab.models.gguf_file import begin_data, writing
from lab.models.parts import LOGIT_STD, matrix
from lab.models.rope_scaling import add_scaling, factor_tensors
from lab.models.shape import PRESETS, Shape
from lab.models.tensor import F32, Tensor, norm
from lab.models.vocabulary import from_gguf, synthetic

__all__ = ["PRESETS", "Progress", "Shape", "make_random_gguf"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes written, bytes in all) after each tensor."""

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}


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

    The same arguments give the same bytes. `vocab` is a GGUF whose tokenizer is copied (its size
    then replaces `shape.n_vocab`); without it a synthetic one of size `shape.n_vocab` is made. The
    template is `chat_template`, else the vocabulary's own, else ChatML. Raises ModelError.
    """
    vocabulary = synthetic(shape.n_vocab) if vocab is None else from_gguf(vocab)
    shape = replace(shape, n_vocab=len(vocabulary))
    template = chat_template or vocabulary.template or templates.CHATML
    plan = list(heads.guessing(shape, _plan(shape)))
    n_total = sum(tensor.nbytes for tensor in plan)
    n_done = 0
    output = "token_embd" if ARCHITECTURES[shape.arch].is_tied else "output"
    with writing(path, shape.arch) as writer:
        _add_metadata(writer, shape, seed)
        vocabulary.write(writer, template)
        for tensor in plan:
            _announce(writer, tensor)
        begin_data(writer)
        for tensor in plan:
            values = tensor.draw(seed)
            if tensor.name == f"{output}.weight":
                values[vocabulary.silent] = 0.0
            writer.write_tensor_data(_stored(values, tensor.type))
            n_done += tensor.nbytes
            if progress is not None:
                progress(n_done, n_total)


def _plan(shape: Shape) -> Iterator[Tensor]:
    """Every tensor in file order."""
    arch = ARCHITECTURES[shape.arch]
    size = (shape.n_vocab, shape.n_embd)
    yield matrix(shape, "token_embd", size, arch.embd_std(shape))
    yield from factor_tensors(shape)
    yield from arch.extra(shape) if arch.extra is not None else ()
    for layer in range(shape.n_layer):
        yield from layer_tensors(shape, layer)
    for layer in range(shape.n_layer, shape.n_layer + shape.n_mtp):
        yield from heads.head_tensors(shape, layer)
    yield from norm(arch.output_norm, shape.n_embd, with_bias=arch.has_norm_bias)
    if not arch.is_tied:
        yield matrix(shape, "output", size, LOGIT_STD / math.sqrt(shape.n_embd))


def _stored(values: F32, kind: GGMLQuantizationType) -> npt.NDArray[np.generic]:
    if kind == GGMLQuantizationType.F32:
        return values
    return quants.quantize(values, kind)


def _announce(writer: GGUFWriter, tensor: Tensor) -> None:
    dtype = np.dtype(np.float32)
    writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.nbytes, tensor.type)


def _add_metadata(writer: GGUFWriter, shape: Shape, seed: int) -> None:
    arch = ARCHITECTURES[shape.arch]
    is_latent = shape.arch == "deepseek2"
    writer.add_name(f"random-{shape.n_layer}x{shape.n_embd}-{shape.ftype}-seed{seed}")
    writer.add_description("Random weights; made by towerctl model random")
    writer.add_file_type(FILE_TYPES[shape.ftype])
    writer.add_quantization_version(2)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer + shape.n_mtp)
    if shape.n_mtp:
        writer.add_nextn_predict_layers(shape.n_mtp)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head if arch.has_heads else 0)
    if arch.heads_kv is not None:
        writer.add_head_count_kv(arch.heads_kv(shape))
    elif arch.has_heads:
        writer.add_head_count_kv(1 if is_latent else shape.n_head_kv)
    writer.add_key_length(shape.head_size + (shape.n_rot if is_latent else 0))
    writer.add_value_length(shape.head_size)
    add_eps = writer.add_layer_norm_eps if arch.is_layer_norm else writer.add_layer_norm_rms_eps
    add_eps(NORM_EPS)
    writer.add_rope_dimension_count(shape.n_rot)
    writer.add_rope_freq_base(shape.rope_freq_base)
    add_scaling(writer, shape)
    if arch.metadata is not None:
        arch.metadata(writer, shape)
