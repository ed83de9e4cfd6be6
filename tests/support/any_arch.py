"""Random-weight GGUFs of any architecture: llama.cpp itself says which tensors it has.

Given metadata alone, `llama_model_init_from_user` asks its caller for the values of every tensor that
an architecture can have, optional ones included.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, GGUFWriter
from llama_cpp import llama_cpp

from lab.models.gguf_file import writing
from lab.models.parts import LOGIT_STD, NORM_SPREAD, QUERY_GAIN
from lab.models.tensor import Tensor
from lab.models.vocabulary import synthetic
from towerd.model.gguf_keys import GgufKeys
from towerd.model.llama_model import init_backend

N_VOCAB = 448
COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "context_length": 4096,
    "embedding_length": 128,
    "feed_forward_length": 128,
    "block_count": 4,
    "leading_dense_block_count": 1,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 48,
    "rope.dimension_count": 32,
    "logit_scale": 1.0,
    "expert_count": 2,
    "expert_used_count": 1,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 64,
}
"""Keys that an architecture does not know are ignored."""
_WITHOUT_ARCH = ("tokenizer.", "xielu.")
"""Keys that begin so are the same in all architectures."""
_NE_OFFSET = 16  # of `ne` in a ggml_tensor: behind its type and its buffer


Values: TypeAlias = npt.NDArray[np.float32]


def make_arch_gguf(
    path: Path,
    arch: str,
    keys: Mapping[str, Any],
    seed: int = 0,
    changed: Callable[[str, Values], Values | None] = lambda _name, values: values,
    more: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Write a float32 model of `arch` whose metadata are COMMON and `keys` (those of `{arch}.`).

    changed: what becomes of the random values of a tensor; None: it is left out
    more: shapes of tensors that llama.cpp takes, and does not ask for"""
    metadata = path.with_suffix(".keys")
    make_metadata_gguf(metadata, arch, keys)
    vocabulary = synthetic(keys.get("vocab_size", N_VOCAB))
    try:
        shapes = _shapes(metadata) | dict(more)
    finally:
        metadata.unlink()
    with writing(path, arch) as writer:
        add_keys(writer, arch, keys)
        is_tied = "output.weight" not in shapes
        for each in (_tensor(name, shape, is_tied) for name, shape in shapes.items()):
            values = each.draw(seed)
            is_words = values.shape[0] == len(vocabulary)  # not codes of sounds
            if is_words and each.name in ("output.weight", "token_embd.weight"):
                values[vocabulary.silent] *= np.float32(0.01)
            if (found := changed(each.name, values)) is not None:
                writer.add_tensor(each.name, found)


def make_metadata_gguf(path: Path, arch: str, keys: Mapping[str, Any]) -> None:
    """Write what `make_arch_gguf` writes, without tensors."""
    with writing(path, arch) as writer:
        add_keys(writer, arch, keys)


def add_keys(writer: GGUFWriter, arch: str, keys: Mapping[str, Any]) -> None:
    """Add a vocabulary of `vocab_size` tokens, and COMMON and `keys` as those of `arch`."""
    known = COMMON | dict(keys)
    synthetic(known["vocab_size"]).write(writer, None)
    for name, value in known.items():
        key = name if name.startswith(_WITHOUT_ARCH) else f"{arch}.{name}"
        if value is None:  # this architecture goes without
            continue
        if isinstance(value, np.ndarray):  # of another type than int32
            kind = GGUFValueType[value.dtype.name.upper()]
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kind)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def _shapes(metadata: Path) -> dict[str, tuple[int, ...]]:
    """numpy shapes of the tensors, by name."""
    init_backend()
    name_of = llama_cpp._lib.ggml_get_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    found: dict[str, tuple[int, ...]] = {}

    def note(tensor: int, _user: Any) -> None:
        dims = (ctypes.c_int64 * 4).from_address(tensor + _NE_OFFSET)
        shape = [int(n) for n in reversed(dims)]
        while len(shape) > 1 and shape[0] == 1:
            del shape[0]
        found[name_of(tensor).decode()] = tuple(shape)

    keys = GgufKeys(metadata)
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mtp = True
    model = lib.llama_model_init_from_user(
        keys.ptr, lib.llama_model_set_tensor_data_t(note), None, params
    )
    assert model, f"llama.cpp makes no model of {metadata}"
    lib.llama_model_free(model)
    keys.close()
    return found


def _tensor(name: str, shape: tuple[int, ...], is_tied: bool) -> Tensor:
    """Values with which activations keep about unit variance, and keys tell tokens apart.

    is_tied: the embedding is the output matrix, too: large ones would have tokens predict themselves"""
    if "rope_f" in name:  # frequency factors: a ramp as Llama 3's
        ramp = 1 + 7 * np.arange(shape[0]) / max(1, shape[0] - 1)
        return Tensor(name, shape, values=tuple(float(each) for each in ramp))
    if name.endswith(".bias") or "exp_probs_b" in name:
        return Tensor(name, shape, 0.1)
    if name.endswith("ssm_a"):  # states fade
        return Tensor(name, shape, 0.1, -1.0)
    if name.endswith("scale"):
        return Tensor(name, shape, mean=1.0)
    if "sinks" in name:
        return Tensor(name, shape, 1.0)
    if len(shape) == 1:  # a norm; one behind a part of a layer keeps the sum near unit variance
        mean = 0.3 if ".post_" in name else 1.0
        return Tensor(name, shape, mean * NORM_SPREAD, mean)
    unit = 1 / math.sqrt(shape[-1])
    if name == "token_embd.weight":
        return Tensor(name, shape, unit if is_tied else 1.0)
    gain = LOGIT_STD if name == "output.weight" else QUERY_GAIN if "attn_q." in name else 1.0
    return Tensor(name, shape, gain * unit)
