"""Convert a llama2.c checkpoint and its tokenizer (the TinyStories models) to GGUF.

llama2.c's "legacy" layout is 7 int32, then float32 tensors back to back. Its RoPE rotates adjacent
pairs of a head's values, as llama.cpp does for the `llama` architecture, so every matrix is copied
unchanged and the arithmetic stays that of the checkpoint.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, LlamaFileType, TokenType

from lab.models import templates
from lab.models.gguf_file import writing
from lab.models.vocabulary import SPACE, Vocabulary, sentencepiece
from towerd.errors import ModelError

F32 = npt.NDArray[np.float32]
N_SPECIAL = 3
N_BYTES = 256
RMS_EPS = 1e-5
ROPE_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class Llama2cConfig:
    """The header of a llama2.c checkpoint, in file order."""

    dim: int
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int
    n_ctx: int

    @property
    def head_dim(self) -> int:
        """Values per head."""
        return self.dim // self.n_heads


def convert(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Write `out`, a float32 GGUF of the checkpoint. Raises ModelError for any other file."""
    shape, weights = _read_checkpoint(checkpoint)
    vocabulary = read_tokenizer(tokenizer, shape.n_vocab)
    with writing(out, "llama") as writer:
        _add_metadata(writer, shape)
        vocabulary.write(writer, templates.STORY)
        for name, tensor in _tensors(shape, weights):
            writer.add_tensor(name, tensor)


def read_tokenizer(path: Path, n_vocab: int) -> Vocabulary:
    """llama2.c's tokenizer file: int32 longest piece, then (float32 score, int32 length, bytes).

    Raises ModelError if the file does not hold exactly `n_vocab` pieces.
    """
    data = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    offset = 4
    try:
        for _ in range(n_vocab):
            score, length = struct.unpack_from("<fi", data, offset)
            offset += 8
            piece = data[offset : offset + length]
            offset += length
            pieces.append(piece.decode().replace(" ", SPACE))
            scores.append(score)
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a llama2.c tokenizer: {error}.") from error
    if offset != len(data):
        raise ModelError(f"{path} does not hold exactly {n_vocab} pieces.")
    pieces[:N_SPECIAL] = ["<unk>", "<s>", "</s>"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * N_BYTES
    types += [TokenType.NORMAL] * (n_vocab - len(types))
    special = {"bos": 1, "eos": 2, "eot": 1, "unknown": 0}
    return sentencepiece(pieces, scores, types, special=special)


def _read_checkpoint(path: Path) -> tuple[Llama2cConfig, F32]:
    data = path.read_bytes()
    n_header = struct.calcsize("<7i")
    if len(data) < n_header:
        raise ModelError(f"{path} is too short for a llama2.c checkpoint.")
    shape = Llama2cConfig(*struct.unpack_from("<7i", data))
    if min(shape.dim, shape.hidden, shape.n_layers, shape.n_heads, shape.n_kv_heads) < 1:
        raise ModelError(f"{path} is not a llama2.c checkpoint.")
    if shape.n_vocab < 1:
        raise ModelError(f"{path} has an output matrix of its own; only tied ones are converted.")
    weights = np.frombuffer(data, dtype="<f4", offset=n_header)
    n_rope = shape.n_ctx * shape.head_dim
    expected = sum(count for _, _, count in _plan(shape)) + n_rope
    if len(weights) != expected:
        raise ModelError(f"{path} holds {len(weights)} values where its header says {expected}.")
    return shape, weights


def _plan(shape: Llama2cConfig) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(name with {} for the layer, shape of one tensor, total values) in file order."""
    dim, kv_dim, layers = shape.dim, shape.n_kv_heads * shape.head_dim, shape.n_layers
    rows: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (shape.n_vocab, dim)),
        ("blk.{}.attn_norm.weight", (dim,)),
        ("blk.{}.attn_q.weight", (dim, dim)),
        ("blk.{}.attn_k.weight", (kv_dim, dim)),
        ("blk.{}.attn_v.weight", (kv_dim, dim)),
        ("blk.{}.attn_output.weight", (dim, dim)),
        ("blk.{}.ffn_norm.weight", (dim,)),
        ("blk.{}.ffn_gate.weight", (shape.hidden, dim)),
        ("blk.{}.ffn_down.weight", (dim, shape.hidden)),
        ("blk.{}.ffn_up.weight", (shape.hidden, dim)),
        ("output_norm.weight", (dim,)),
    ]
    for name, size in rows:
        yield name, size, int(np.prod(size)) * (layers if "{}" in name else 1)


def _tensors(shape: Llama2cConfig, weights: F32) -> Iterator[tuple[str, F32]]:
    offset = 0
    for name, size, count in _plan(shape):
        block = weights[offset : offset + count]
        offset += count
        if "{}" not in name:
            yield name, block.reshape(size)
            continue
        for layer, tensor in enumerate(block.reshape(shape.n_layers, *size)):
            yield name.format(layer), tensor


def _add_metadata(writer: GGUFWriter, shape: Llama2cConfig) -> None:
    writer.add_name("stories260K" if shape.dim == 64 else "TinyStories")
    writer.add_description("Llama trained on TinyStories, converted from a llama2.c checkpoint")
    writer.add_license("MIT")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
