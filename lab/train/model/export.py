"""Weights to a GGUF of the llama architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, LlamaFileType

from lab.models.gguf_file import writing
from lab.models.vocabulary import Vocabulary
from lab.train.errors import TrainError
from lab.train.model.network import NetworkShape, Weights

ARCHITECTURE = "llama"
FILE_TYPES: Mapping[str, tuple[LlamaFileType, npt.DTypeLike]] = {
    "f32": (LlamaFileType.ALL_F32, np.float32),
    "f16": (LlamaFileType.MOSTLY_F16, np.float16),
}


@dataclass(frozen=True)
class Card:
    """The metadata of a GGUF about its origin."""

    name: str
    description: str
    licence: str
    numbers: Mapping[str, int | float]
    """Stored as towerd.train.<name>."""


def export(
    path: Path,
    weights: Weights,
    shape: NetworkShape,
    vocabulary: Vocabulary,
    card: Card,
    *,
    ftype: str = "f16",
) -> None:
    """Write `path` whole or not at all; matrices as `ftype`, norms as float32. Raises TrainError."""
    if ftype not in FILE_TYPES:
        raise TrainError(f"The file type is {' or '.join(FILE_TYPES)}, not {ftype!r}.")
    if len(vocabulary) != shape.n_vocab:
        raise TrainError(
            f"{shape.n_vocab} tokens in the network, {len(vocabulary)} in its tokenizer."
        )
    file_type, dtype = FILE_TYPES[ftype]
    with writing(path, ARCHITECTURE) as writer:
        _add_metadata(writer, shape, card, file_type)
        vocabulary.write(writer, vocabulary.template)
        for name, weight in weights.items():
            values = weight.detach().cpu().float().numpy()
            writer.add_tensor(name, values.astype(dtype) if values.ndim == 2 else values)


def _add_metadata(
    writer: GGUFWriter, shape: NetworkShape, card: Card, file_type: LlamaFileType
) -> None:
    writer.add_name(card.name)
    writer.add_description(card.description)
    writer.add_license(card.licence)
    for name, value in card.numbers.items():
        key = f"towerd.train.{name}"
        if isinstance(value, int):
            writer.add_uint64(key, value)
        else:
            writer.add_float64(key, value)
    writer.add_file_type(file_type)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_freq_base)
