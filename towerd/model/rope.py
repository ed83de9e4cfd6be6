"""The RoPE of a model file: the rotation of each layer of its KV cache.

A GGUF does not say all of it: how an architecture rotates its keys is defined in llama.cpp's
`src/models/<arch>.cpp`, and here by a table. Architectures that are not in the table are refused,
because a wrong rotation would go unnoticed. Keys and defaults: `src/llama-model.cpp` (load_hparams,
get_rope_factors), `src/llama-context.cpp` (the context's overrides).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towerd.model.gguf_keys import GgufKeys
from towerd.models.hub.file_names import parts_of
from towerd.slots.errors import StateError
from towerd.slots.rope import Kind, LayerRope, Rope, Sections

PAIRINGS: dict[int, Kind] = {0: "norm", 2: "neox", 8: "neox", 40: "neox"}
"""llama.cpp's rope types (norm, neox, mrope, imrope) by how they pair elements."""
MROPE, IMROPE = 8, 40

PLAIN = frozenset(
    "arctic baichuan bailingmoe2 bitnet chameleon chatglm codeshell command-r dbrx deepseek2 dots1"
    " ernie4_5 ernie4_5-moe falcon gemma gemma3 glm4 glm4moe gptneox grovemoe internlm2 jais2"
    " minimax-m2 mistral4 nemotron olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2"
    " plamo plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe seed_oss smollm3"
    " stablelm starcoder2 xverse".split()
)
"""Architectures that rotate finished keys without frequency factors."""
WITH_FACTORS = frozenset(
    "apertus arcee bailingmoe deci deepseek exaone exaone4 granite granitemoe llama minicpm"
    " minicpm3 mistral3 phi3 phimoe".split()
)
"""Architectures that divide the angles by a tensor of factors if the file holds one."""
AT_THE_END = frozenset(("deepseek2", "minicpm3", "mistral4", "plm"))
"""Architectures that rotate the last elements of a head instead of the first."""
WEIGHTED = "multiplies its rotated keys by weights, which a further rotation would mix up"
REASONS = {
    "hunyuan-dense": WEIGHTED,
    "hunyuan-moe": WEIGHTED,
    "hunyuan_vl": WEIGHTED,
    "maincoder": WEIGHTED,
    "llama4": "scales its attention by absolute positions",
    "grok": "scales its attention by absolute positions",
}
NOPE_STEP = 4
"""smollm3: every fourth layer has no RoPE."""
BAICHUAN_ROPE_LAYERS = 32
"""The 7B model; its larger sister has ALiBi."""


@dataclass(frozen=True, slots=True)
class Running:
    """Parameters of the loaded model and the context that the file does not have.

    rope_type: `llama_model_rope_type`; n_swa: `llama_model_n_swa`; n_ctx_seq: positions that one
    sequence may have (`llama_n_ctx` if unified); freq_base, freq_scale: overrides, 0 for none"""

    rope_type: int
    n_ctx_seq: int
    n_swa: int = 0
    freq_base: float = 0.0
    freq_scale: float = 0.0


class _File:
    """The keys of `{arch}.` and the small tensors of a GGUF, all its parts included."""

    def __init__(self, path: Path) -> None:
        self.parts: list[GgufKeys] = []
        try:
            for part in parts_of(path):
                self.parts.append(GgufKeys(part))
        except ValueError as error:
            self.close()
            raise StateError(str(error)) from error
        self.arch = str(self.parts[0].get("general.architecture", ""))

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def key(self, name: str, default: Any) -> Any:
        """The value of `{arch}.{name}`."""
        return self.parts[0].get(f"{self.arch}.{name}", default)

    def floats(self, name: str) -> tuple[float, ...] | None:
        """The values of a float32 tensor, None if no part has it."""
        return next((found for part in self.parts if (found := part.floats(name))), None)


def read_rope(path: Path, running: Running) -> Rope:
    """The rotation of every layer in the KV cache of the model at `path`, as it runs.

    Takes about 0.1 s for a vocabulary of 150,000 tokens. Raises StateError, with the reason, if
    this architecture's keys cannot be moved or are unknown."""
    file = _File(path)
    try:
        return _read(file, running)
    finally:
        file.close()


def _read(file: _File, running: Running) -> Rope:
    _check_movable(file, running)
    roped = _layer(file, running)
    without = LayerRope("none", roped.head_dim)
    n_layer = int(file.key("block_count", 0)) - int(file.key("nextn_predict_layers", 0))
    return Rope(tuple(roped if _rotates(file, il) else without for il in range(n_layer)))


def _check_movable(file: _File, running: Running) -> None:
    reason = REASONS.get(file.arch, "")
    if not reason and file.arch not in PLAIN | WITH_FACTORS:
        reason = "is an architecture whose RoPE is not known"
    elif running.rope_type not in PAIRINGS:
        reason = f"has a RoPE of unknown type {running.rope_type}"
    elif running.n_swa:
        reason = "keeps only the last rows of its sliding-window layers"
    elif file.key("attention.temperature_scale", 0.0):
        reason = "scales its attention by absolute positions"
    elif file.arch == "baichuan" and file.key("block_count", 0) != BAICHUAN_ROPE_LAYERS:
        reason = "has ALiBi instead of RoPE at this size"
    if reason:
        raise StateError(f"keys cannot be moved to other positions: {file.arch} {reason}")


def _rotates(file: _File, layer: int) -> bool:
    if file.arch == "smollm3":
        return (layer + 1) % NOPE_STEP != 0
    if file.arch in ("granite", "granitemoe"):
        return bool(file.key("rope.scaling.finetuned", True))
    return True


def _layer(file: _File, running: Running) -> LayerRope:
    n_head = _first(file.key("attention.head_count", 0))
    default = int(file.key("embedding_length", 0)) // max(1, n_head)
    head_dim = int(file.key("attention.key_length", default))
    n_rot = int(file.key("rope.dimension_count", head_dim))
    n_ctx_orig = int(file.key("rope.scaling.original_context_length", 0))
    n_ctx_orig = n_ctx_orig or int(file.key("context_length", 0))
    scaling = str(file.key("rope.scaling.type", "linear"))
    return LayerRope(
        kind=PAIRINGS[running.rope_type],
        head_dim=head_dim,
        n_rot=n_rot,
        first=head_dim - n_rot if file.arch in AT_THE_END else 0,
        freq_base=running.freq_base or float(file.key("rope.freq_base", 10000.0)),
        freq_scale=_freq_scale(file, running, scaling),
        ext_factor=1.0 if scaling == "yarn" else 0.0,
        **_betas(file),
        n_ctx_orig=n_ctx_orig,
        factors=_factors(file, running.n_ctx_seq > n_ctx_orig),
        sections=_sections(file) if running.rope_type in (MROPE, IMROPE) else None,
        interleaved=running.rope_type == IMROPE,
    )


def _freq_scale(file: _File, running: Running, scaling: str) -> float:
    if scaling == "none":
        return 1.0
    factor = float(file.key("rope.scaling.factor", file.key("rope.scale_linear", 0.0)))
    return running.freq_scale or (1.0 / factor if factor else 1.0)


def _betas(file: _File) -> dict[str, float]:
    """The betas from the file, which only mistral3 uses."""
    if file.arch != "mistral3":
        return {}
    return {
        "beta_fast": float(file.key("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(file.key("rope.scaling.yarn_beta_slow", 1.0)),
    }


def _factors(file: _File, is_long: bool) -> tuple[float, ...] | None:
    if file.arch not in WITH_FACTORS:
        return None
    chosen = "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
    return file.floats("rope_freqs.weight") or file.floats(chosen)


def _sections(file: _File) -> Sections:
    sections = file.key("rope.dimension_sections", None)
    if not isinstance(sections, Sequence) or not 1 <= len(sections) <= 4:
        raise StateError("rope: the file has no usable rope.dimension_sections")
    time, height, width, other = (*(int(n) for n in sections), 0, 0, 0)[:4]
    return time, height, width, other


def _first(value: Any) -> int:
    """A count, or the first of one count per layer."""
    return int(value[0]) if isinstance(value, Sequence) and value else int(value or 0)
