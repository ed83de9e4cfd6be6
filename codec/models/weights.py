"""The weights of a small llama-architecture GGUF, for the kernel `lm`."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from towerd.codec.errors import UnknownModel
from towerd.codec.models.gguf_header import GgufHeader, TensorEntry, Value, read_header
from towerd.kernels.lm import LmShape, Weights, pack, pack_norm, pack_q8

ARCHITECTURE = "llama"
Numbers = TypeVar("Numbers", npt.NDArray[np.float32], npt.NDArray[np.float16])

FILE_BYTES_MAX = 1 << 26
N_CTX_MAX = 1024
"""Most tokens of one text that the model attends to, even if it was trained on more."""
KEPT = 4
"""A text that has become too long is cut to this share of its tokens, the last ones."""
_SIZE_MAX = 1 << 17
_GROUP_MAX, _HEAD_MAX = 64, 1024
_F32, _F16, _Q8_0, _BF16 = 0, 1, 8, 30
_Q8_BLOCK, _Q8_BYTES = 32, 34
_ELEMENT_BYTES = {_F32: 4, _F16: 2, _BF16: 2}
_LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm")


@dataclass(frozen=True)
class LmWeights:
    """The arguments of `make_lm` except for the angles; `name`: 8 bytes of the file's hash."""

    name: bytes
    shape: LmShape
    matrices: list[Weights]
    norms: list[npt.NDArray[np.float32]]
    n_rot: int
    freq_base: float

    def within(self, n_ctx: int) -> LmWeights:
        """The same for attending to at most `n_ctx` tokens."""
        n_ctx = min(n_ctx, self.shape.n_ctx)
        return replace(self, shape=replace(self.shape, n_ctx=n_ctx, n_keep=n_ctx // KEPT))


def load_weights(path: Path, n_ctx: int = 0) -> LmWeights:
    """Read a model; `n_ctx` as in `shape_of`. Raises UnknownModel for anything but a whole
    llama-architecture model with finite weights that the kernel supports."""
    try:
        n_bytes = path.stat().st_size
        if n_bytes > FILE_BYTES_MAX:
            raise UnknownModel(
                f"{path} has {n_bytes} bytes, and a mini model at most {FILE_BYTES_MAX}."
            )
        data = path.read_bytes()
    except OSError as error:
        raise UnknownModel(f"{path} cannot be read: {error.strerror}.") from error
    try:
        return _WeightsReader(data).weights(n_ctx)
    except UnknownModel as error:
        why = str(error)
        raise UnknownModel(f"{path} is no mini model: {why[0].lower()}{why[1:]}") from error


def shape_of(header: GgufHeader, n_ctx: int) -> LmShape:
    """The sizes that the keys state. `n_ctx`: tokens to attend to, at most what the model was
    trained on and N_CTX_MAX; 0: that maximum. UnknownModel if a size is missing or out of range."""
    keys = header.keys
    if keys.get("general.architecture") != ARCHITECTURE.encode():
        raise UnknownModel(f"Its architecture is not {ARCHITECTURE}.")
    for key, value in keys.items():
        scaled = key.startswith(f"{ARCHITECTURE}.rope.scaling.") and value != b"none"
        if scaled or ".expert_" in key:
            raise UnknownModel(f"It has {key}, which is not evaluated here.")
    n_embd, n_head = _size(keys, "embedding_length"), _size(keys, "attention.head_count")
    head_dim = _size(keys, "attention.key_length", max(1, n_embd // n_head))
    n_head_kv = _size(keys, "attention.head_count_kv", n_head)
    fit = n_head % n_head_kv == 0 and n_head // n_head_kv <= _GROUP_MAX
    if not fit or head_dim % 2 or head_dim > _HEAD_MAX or n_head_kv * head_dim > 4 * n_embd:
        raise UnknownModel("Its heads do not fit each other.")
    if _size(keys, "attention.value_length", head_dim) != head_dim:
        raise UnknownModel("Its keys and values have other lengths.")
    eps = _number(keys, "attention.layer_norm_rms_epsilon", 1e-5)
    if not 0 <= eps < 1:
        raise UnknownModel("Its norms have no epsilon from 0 to 1.")
    embedding = header.tensors.get("token_embd.weight")
    n_vocab = embedding.shape[1] if embedding is not None and len(embedding.shape) == 2 else 0
    if not 0 < n_vocab <= _SIZE_MAX:
        raise UnknownModel("It has no embedding of some tokens.")
    seen = min(n_ctx or N_CTX_MAX, N_CTX_MAX, _size(keys, "context_length"))
    n_layer, n_ff = _size(keys, "block_count"), _size(keys, "feed_forward_length")
    return LmShape(
        n_vocab,
        n_embd,
        n_layer,
        n_head,
        n_head_kv,
        head_dim,
        n_ff,
        seen,
        seen // KEPT,
        float(np.float32(eps)),
    )


def _number(keys: dict[str, Value], name: str, default: float | None = None) -> float:
    value = keys.get(f"{ARCHITECTURE}.{name}", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnknownModel(f"Its key {ARCHITECTURE}.{name} is not a number.")
    return value


def _size(keys: dict[str, Value], name: str, default: int | None = None) -> int:
    value = _number(keys, name, default)
    if not isinstance(value, int) or not 0 < value <= _SIZE_MAX:
        raise UnknownModel(f"Its key {ARCHITECTURE}.{name} is no size up to {_SIZE_MAX}.")
    return value


class _WeightsReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._header = read_header(memoryview(data))

    def weights(self, n_ctx: int) -> LmWeights:
        """All weights, checked."""
        shape = shape_of(self._header, n_ctx)
        self._check_names(shape.n_layer)
        sizes = shape.matrices()
        embedding = self._matrix("token_embd", *sizes[0])
        is_tied = "output.weight" not in self._header.tensors
        output = embedding if is_tied else self._matrix("output", *sizes[1])
        matrices, norms = [embedding, output], []
        for i in range(shape.n_layer):
            matrices += [
                self._matrix(f"blk.{i}.{part}", *size)
                for part, size in zip(_LAYER, sizes[2:9], strict=True)
            ]
            norms += [self._norm(f"blk.{i}.{part}", shape.n_embd) for part in _NORMS]
        norms.append(self._norm("output_norm", shape.n_embd))
        keys = self._header.keys
        n_rot = _size(keys, "rope.dimension_count", shape.head_dim)
        base = _number(keys, "rope.freq_base", 10000.0)
        if n_rot % 2 or n_rot > shape.head_dim or not 1 <= base <= 1e12:
            raise UnknownModel("Its angles of RoPE are none that are evaluated here.")
        name = hashlib.blake2b(self._data, digest_size=8).digest()
        return LmWeights(name, shape, matrices, norms, n_rot, float(np.float32(base)))

    def _check_names(self, n_layer: int) -> None:
        """Refuse tensors that are not read here: the result would silently be wrong."""
        if n_layer > len(self._header.tensors):
            raise UnknownModel(f"It has fewer tensors than its {n_layer} layers need.")
        known = {"token_embd.weight", "output.weight", "output_norm.weight"}
        known |= {f"blk.{i}.{part}.weight" for i in range(n_layer) for part in (*_LAYER, *_NORMS)}
        if odd := sorted(self._header.tensors.keys() - known):
            raise UnknownModel(f"It has a tensor {odd[0]}, which is not evaluated here.")

    def _norm(self, name: str, n: int) -> npt.NDArray[np.float32]:
        entry, data = self._tensor(name, (n,))
        if entry.type != _F32:
            raise UnknownModel(f"Its tensor {name}.weight is not of float32.")
        return pack_norm(_finite(np.frombuffer(data, "<f4").astype(np.float32), name))

    def _matrix(self, name: str, n_rows: int, n_columns: int) -> Weights:
        entry, data = self._tensor(name, (n_columns, n_rows))
        if entry.type == _Q8_0:
            blocks = np.frombuffer(data, np.uint8).reshape(n_rows, -1, _Q8_BYTES)
            _finite(blocks[..., :2].copy().view("<f2"), name)
            return pack_q8(blocks)
        if entry.type == _F16:
            return pack(_finite(np.frombuffer(data, "<f2").reshape(n_rows, -1), name))
        if entry.type == _BF16:
            wide = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
            values = wide.view(np.float32)
        else:
            values = np.frombuffer(data, "<f4").astype(np.float32)
        return pack(_finite(values.reshape(n_rows, -1), name))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> tuple[TensorEntry, bytes]:
        entry = self._header.tensors.get(f"{name}.weight")
        if entry is None:
            raise UnknownModel(f"It has no tensor {name}.weight.")
        if entry.shape != shape:
            raise UnknownModel(
                f"Its tensor {name}.weight has the shape {entry.shape} and should have {shape}."
            )
        n = math.prod(shape)
        if entry.type == _Q8_0 and shape[0] % _Q8_BLOCK == 0:
            n_bytes = n // _Q8_BLOCK * _Q8_BYTES
        elif entry.type in _ELEMENT_BYTES:
            n_bytes = n * _ELEMENT_BYTES[entry.type]
        else:
            raise UnknownModel(
                f"Its tensor {name}.weight is of ggml's type {entry.type}; what is read here is "
                "f32, f16, bf16 and q8_0."
            )
        data = self._data[entry.offset : entry.offset + n_bytes]
        if len(data) != n_bytes:
            raise UnknownModel(f"Its tensor {name}.weight lies beyond the end of the file.")
        return entry, data


def _finite(values: Numbers, name: str) -> Numbers:
    if not np.isfinite(values).all():
        raise UnknownModel(f"Its tensor {name}.weight has a number that is not finite.")
    return values
