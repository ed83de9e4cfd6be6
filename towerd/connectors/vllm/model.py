"""What the rows of a vLLM model depend on: its layout and its row identity.

They are never those of a llama.cpp model: vLLM computes other rows from the same weights, in another order of
channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towerd.errors import ConfigError, ModelError
from towerd.kernels.formats import BY_NAME
from towerd.model.model_file import Memo, file_hash
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RopeValue, RowIdentity

FORMATS = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
"""torch's names of the element types that rows may have, and ggml's."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
VOLATILE = ("_name_or_path", "transformers_version")
"""Entries of a model's config that say nothing of the model."""
MARK = "vllm:"
"""Begins the hashes and the architecture of these row identities."""


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """By layer name, in the order of layers, vLLM's spec of the layers that have rows of their own.
    Raises ConfigError for a cache that is not full attention in one group."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"This model has {len(groups)} KV cache groups; the connector keeps rows of full attention in one."
        )
    spec = groups[0].kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    names = [name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers]
    found = {name: spec if each is None else each[name] for name in sorted(names, key=_place)}
    for name, one in found.items():
        kind = type(one).__name__
        if kind != "FullAttentionSpec" or one.state_content_bytes is not None:
            raise ConfigError(
                f"The layer {name} keeps a {kind}; the connector keeps rows of full attention."
            )
        if str(one.dtype) not in FORMATS or one.kv_quant_mode.value:
            raise ConfigError(
                f"The layer {name} keeps rows as {one.dtype}; the connector keeps float32, float16 and "
                "bfloat16: leave --kv-cache-dtype at auto, and name another towerd.format to save space."
            )
    return found


def _place(name: str) -> tuple[tuple[int, str], ...]:
    """Orders layers by the numbers in their names."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def layout_of(specs: Mapping[str, Any]) -> KVLayout:
    """The layout of a token's rows in these layers."""
    k, v = [], []
    for spec in specs.values():
        row = BY_NAME[FORMATS[str(spec.dtype)]]
        k.append(Plane(row.ggml_type, row.row_bytes(spec.num_kv_heads * spec.head_size)))
        v.append(Plane(row.ggml_type, row.row_bytes(spec.num_kv_heads * spec.head_size_v)))
    return KVLayout(tuple(k), tuple(v))


def row_identity(vllm_config: Any, layout: KVLayout, memo: Memo, version: str) -> RowIdentity:
    """The row identity of vLLM's model. version: of vLLM, which decides how a model's weights are laid out and in which
    order a row has its channels. All of its weights are read, about 1 GB/s, the first time that `memo`
    is asked for their hash. Raises ModelError (they cannot be read) or ConfigError (there are none)."""
    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in VOLATILE}
    how = {
        "vllm": version,
        "config": config,
        "weights": _weights(vllm_config, memo, version),
        "dtype": str(model.dtype),
        "quantization": [
            str(model.quantization),
            str(getattr(model, "quantization_config", None)),
        ],
        "impl": str(getattr(model, "model_impl", None)),
        "max_model_len": model.max_model_len if _depends_on_length(config) else None,
    }
    text = json.dumps(how, sort_keys=True, default=str)
    model_hash = MARK + hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    return RowIdentity(
        model_hash=model_hash,
        arch=MARK + ",".join(config.get("architectures") or [str(config.get("model_type"))]),
        tokenizer=_tokenizer(model, model_hash),
        rope=_rope(config),
        lora=(),
        layout=layout,
        rot_k=False,
        rot_v=False,
        long_context=False,
    )


def vllm_version() -> str:
    """That of the vLLM which runs here."""
    import vllm

    return str(vllm.__version__)


def _weights(vllm_config: Any, memo: Memo, version: str) -> list[str]:
    """What the weights are: the hashes of their files."""
    how, model = str(vllm_config.load_config.load_format), vllm_config.model_config
    if how == "dummy":
        return [f"dummy of vLLM {version}", str(model.seed)]
    folder = _folder(model.model, model.revision, vllm_config.load_config.download_dir)
    if folder.is_file():
        return [file_hash(folder, memo)]
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    if not files:
        raise ConfigError(f"There are no weights in {folder} to know this model by.")
    return [f"{path.name} {file_hash(path, memo)}" for path in files]


def _folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Where the files of a model are, which vLLM has loaded."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        where = snapshot_download(
            model, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except Exception as error:
        raise ModelError(f"The files of the model {model} are not found: {error}") from error
    return Path(where)


def _tokenizer(model: Any, model_hash: str) -> str:
    """A hash of the tokenizer's files; without any, the ids mean what this model's do."""
    folder, digest = Path(str(model.tokenizer)), hashlib.blake2b(digest_size=16)
    files = [folder / name for name in TOKENIZER if (folder / name).is_file()]
    for path in files:
        digest.update(path.name.encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return MARK + (digest.hexdigest() if files else model_hash.removeprefix(MARK))


def _depends_on_length(config: Mapping[str, Any]) -> bool:
    """Whether vLLM may choose RoPE factors by the engine's greatest length, as it does for LongRoPE."""
    text = json.dumps(_rope(config), default=str)
    return any(kind in text for kind in ("longrope", "dynamic", '\\"su\\"'))


def _rope(config: Mapping[str, Any]) -> dict[str, RopeValue]:
    """The RoPE entries of a model's config, also of its text part, as numbers and texts."""
    found: dict[str, RopeValue] = {}
    for part in (config, config.get("text_config")):
        for key, value in part.items() if isinstance(part, Mapping) else ():
            if key.startswith(("rope", "partial_rotary")) and value is not None:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                found[key] = value if is_number else json.dumps(value, sort_keys=True, default=str)
    return found
