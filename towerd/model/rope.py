"""The RoPE of a model file: the rotation of each layer of its KV cache.

A GGUF does not say all of it: how an architecture rotates its keys is defined in llama.cpp's
`src/models/<arch>.cpp`, and here by a table. Architectures that are not in the table are refused,
because a wrong rotation would go unnoticed. Keys and defaults: `src/llama-model.cpp` (load_hparams,
get_rope_factors), `src/llama-context.cpp` (the context's overrides).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from towerd.model.gguf_keys import GgufKeys
from towerd.models.hub.file_names import parts_of
from towerd.slots.errors import StateError
from towerd.slots.rope import Kind, LayerRope, Rope, Sections

PAIRINGS: dict[int, Kind] = {0: "norm", 2: "neox", 8: "neox", 40: "neox"}
"""llama.cpp's rope types (norm, neox, mrope, imrope) by how they pair elements."""
MROPE, IMROPE = 8, 40

PLAIN = frozenset(
    "afmoe arctic baichuan bailingmoe2 bitnet chameleon chatglm codeshell cohere2 cohere2moe"
    " command-r dbrx deepseek2 dots1 ernie4_5 ernie4_5-moe falcon falcon-h1 gemma gemma2 gemma3"
    " gemma3n glm4 glm4moe gpt-oss gptneox grovemoe internlm2 jais2 laguna lfm2 lfm2moe maple mellum"
    " mimo2 minimax-m2 mistral4 muse-glimmer nemotron olmo olmo2 olmoe openelm orion paddleocr"
    " pangu-embedded phi2 plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe"
    " qwen3moe qwen3next qwen3vl qwen3vlmoe seed_oss smallthinker smollm3 spark2_5 stablelm starcoder2"
    " xverse".split()
)
"""Architectures that rotate finished keys without frequency factors."""
WITH_FACTORS = frozenset(
    "apertus arcee bailingmoe deci deepseek exaone exaone-moe exaone4 gemma4 granite granite_swa"
    " granitehybrid granitemoe llama minicpm minicpm3 mistral3 phi3 phimoe step35".split()
)
"""Architectures that divide the angles by a tensor of factors if the file holds one."""
UNROTATED = frozenset(("jamba", "nemotron_h", "nemotron_h_moe"))
"""Architectures whose keys depend on no position."""
PERIODIC = frozenset(("qwen3next", "qwen35", "qwen35moe"))
"""Architectures of which each `full_attention_interval`-th layer is attention, unless the file lists the
recurrent ones."""
FULL_FACTORS = frozenset(("gemma4", "step35"))
"""Of these, the ones that do so in the layers without a window alone."""
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
"""smollm3, afmoe: every fourth layer has no RoPE; smallthinker: the first of every four."""
BAICHUAN_ROPE_LAYERS = 32
"""The 7B model; its larger sister has ALiBi."""


@dataclass(frozen=True, slots=True)
class Windowed:
    """Which layers of an architecture have a sliding window, and how their rotation differs.

    base: `file`: `rope.freq_base_swa`, or else the file's own base; a number instead of the
        latter; `full`: that of the other layers, with the context's override
    scale: `file`: the file's own; `full`: that of the other layers, with the override; `none`: 1"""

    period: int
    """Of so many layers the last one has no window, unless the file says otherwise; 0: it does."""
    base: Literal["file", "full"] | float = "file"
    scale: Literal["file", "full", "none"] = "file"
    has_yarn: bool = True
    is_full_first: bool = False
    """The first of `period` layers has no window instead of the last one."""
    is_optional: bool = False
    """Only a file with `attention.sliding_window` has windows."""
    is_rest_roped: bool = True
    """The layers without a window rotate, too."""


_OWN = 10000.0
WINDOWED = {
    "afmoe": Windowed(4, is_optional=True),
    "cohere2": Windowed(4, "full", "full", is_rest_roped=False),
    "cohere2moe": Windowed(4, "full", "full", is_full_first=True, is_rest_roped=False),
    "exaone-moe": Windowed(4, "full", "full", is_rest_roped=False),
    "exaone4": Windowed(4, "full", "full", is_rest_roped=False),
    "gemma2": Windowed(2),
    "gemma3": Windowed(6, _OWN, "none", is_optional=True),
    "gemma3n": Windowed(5, _OWN, "none"),
    "gemma4": Windowed(0, _OWN, "none"),
    "gpt-oss": Windowed(2),
    "granite_swa": Windowed(0, "full", "full"),
    "laguna": Windowed(4, "file", "none", has_yarn=False, is_full_first=True, is_optional=True),
    "maple": Windowed(0, is_rest_roped=False),
    "mellum": Windowed(4, "full", "none", has_yarn=False, is_optional=True),
    "mimo2": Windowed(0, _OWN, "none"),
    "muse-glimmer": Windowed(4, "file", "none", is_rest_roped=False),
    "olmo2": Windowed(4, "full", "none", has_yarn=False, is_optional=True),
    "plamo3": Windowed(8, _OWN, "none", is_optional=True),
    "smallthinker": Windowed(4, is_full_first=True, is_optional=True),
    "spark2_5": Windowed(0),
    "step35": Windowed(0, _OWN, "none"),
}
"""Architectures with two caches, as their `load_arch_hparams` and their graphs have them."""
OWN_N_ROT = frozenset(("gemma4", "laguna", "maple", "spark2_5", "step35"))
"""Architectures whose windowed layers rotate `rope.dimension_count_swa` elements."""
EXAONE4_WINDOWED_LAYERS = 64
"""exaone4: the 32B model alone has windows."""
GEMMA3N_KV_LAYERS = 20
"""gemma3n: later layers use the rows of the last ones of these."""


@dataclass(frozen=True, slots=True)
class Running:
    """Parameters of the loaded model and the context that the file does not have.

    rope_type: `llama_model_rope_type`; n_ctx_seq: positions that one sequence may have
    (`llama_n_ctx` if unified); freq_base, freq_scale: overrides, 0 for none"""

    rope_type: int
    n_ctx_seq: int
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
    n_layer = _n_cached(file)
    windows = _windows(file)[:n_layer]
    full = _layer(file, running)
    windowed = _windowed_layer(file, full) if any(windows) else full
    layers = []
    for il, has_window in enumerate(windows):
        layer = windowed if has_window else full
        is_roped = _rotates(file, il, has_window)
        layers.append(layer if is_roped else LayerRope("none", layer.head_dim))
    cached = [il for il in range(n_layer) if _has_rows(file, il)]
    order = sorted(cached, key=windows.__getitem__)  # the window's cache comes second
    return Rope(tuple(layers[il] for il in order), sum(windows[il] for il in cached))


def _check_movable(file: _File, running: Running) -> None:
    reason = REASONS.get(file.arch, "")
    if not reason and file.arch not in PLAIN | WITH_FACTORS | UNROTATED:
        reason = "is an architecture whose RoPE is not known"
    elif file.arch in UNROTATED:
        return
    elif running.rope_type not in PAIRINGS:
        reason = f"has a RoPE of unknown type {running.rope_type}"
    elif file.key("attention.temperature_scale", 0.0):
        reason = "scales its attention by absolute positions"
    elif file.arch == "baichuan" and file.key("block_count", 0) != BAICHUAN_ROPE_LAYERS:
        reason = "has ALiBi instead of RoPE at this size"
    elif file.arch not in OWN_N_ROT and file.key("rope.dimension_count_swa", None) is not None:
        reason = "has a RoPE of another size in its sliding-window layers"
    if reason:
        raise StateError(f"keys cannot be moved to other positions: {file.arch} {reason}")


def _n_layer(file: _File) -> int:
    return int(file.key("block_count", 0)) - int(file.key("nextn_predict_layers", 0))


def _n_cached(file: _File) -> int:
    """Layers that have rows of their own: the first ones."""
    n_layer = _n_layer(file)
    if file.arch == "gemma3n":
        return min(n_layer, GEMMA3N_KV_LAYERS)
    if file.arch == "gemma4":
        shared = int(file.key("attention.shared_kv_layers", 0))
        return min(n_layer, int(file.key("block_count", 0)) - shared)
    return n_layer


def _has_rows(file: _File, layer: int) -> bool:
    """Whether a layer has attention, not a recurrent state or a feed-forward part alone."""
    n_head_kv = file.key("attention.head_count_kv", 1)
    if isinstance(n_head_kv, Sequence):
        return layer < len(n_head_kv) and bool(n_head_kv[layer])
    if file.arch not in PERIODIC:
        return True
    recurrent = file.key("attention.recurrent_layers", None)
    if isinstance(recurrent, Sequence):
        return not (layer < len(recurrent) and recurrent[layer])
    return (layer + 1) % int(file.key("full_attention_interval", 4)) == 0


def _windows(file: _File) -> list[bool]:
    """Which of the layers have a sliding window."""
    known, n_layer = WINDOWED.get(file.arch), _n_layer(file)
    if known is None or not _has_windows(file, known):
        return [False] * n_layer
    pattern = file.key("attention.sliding_window_pattern", known.period)
    if isinstance(pattern, Sequence):
        return [bool(each) for each in [*pattern, *[0] * n_layer][:n_layer]]
    if not known.period:
        raise StateError("rope: the file does not say which layers have a sliding window")
    period = int(pattern)
    full = 0 if known.is_full_first else period - 1
    return [period == 0 or il % period != full for il in range(n_layer)]


def _has_windows(file: _File, known: Windowed) -> bool:
    if file.arch == "exaone4":
        return _n_layer(file) == EXAONE4_WINDOWED_LAYERS
    return not known.is_optional or int(file.key("attention.sliding_window", 0)) > 0


def _rotates(file: _File, layer: int, has_window: bool) -> bool:
    known = WINDOWED.get(file.arch)
    if file.arch in UNROTATED:
        return False
    match file.arch:
        case "smollm3" | "afmoe":
            return (layer + 1) % NOPE_STEP != 0
        case "smallthinker":
            is_plain = known is None or not _has_windows(file, known)
            return is_plain or _n_layer(file) == NOPE_STEP or layer % NOPE_STEP != 0
        case "cohere2moe":
            return has_window or layer < int(file.key("leading_dense_block_count", 0))
        case "exaone4" if known is not None and not _has_windows(file, known):
            return True
        case "granite" | "granitehybrid" | "granitemoe":
            return bool(file.key("rope.scaling.finetuned", True))
        case "granite_swa":
            pattern = file.key("attention.rope_pattern", [])
            return layer >= len(pattern) or bool(pattern[layer])
    return has_window or known is None or known.is_rest_roped


def _layer(file: _File, running: Running) -> LayerRope:
    """The rotation of the layers without a window."""
    n_head = _first(file.key("attention.head_count", 0))
    default = int(file.key("embedding_length", 0)) // max(1, n_head)
    head_dim = int(file.key("attention.key_length", default))
    n_rot = int(file.key("rope.dimension_count", head_dim))
    n_rot = n_rot // 2 if file.arch == "step35" else n_rot
    n_ctx_orig = int(file.key("rope.scaling.original_context_length", 0))
    n_ctx_orig = n_ctx_orig or int(file.key("context_length", 0))
    scaling = str(file.key("rope.scaling.type", "linear"))
    return LayerRope(
        kind=PAIRINGS.get(running.rope_type, "none"),
        head_dim=head_dim,
        n_rot=n_rot,
        first=head_dim - n_rot if file.arch in AT_THE_END else 0,
        freq_base=running.freq_base or _freq_base(file),
        freq_scale=1.0 if scaling == "none" else running.freq_scale or _freq_scale(file),
        ext_factor=1.0 if scaling == "yarn" else 0.0,
        **_betas(file),
        n_ctx_orig=n_ctx_orig,
        factors=_factors(file, n_rot, running.n_ctx_seq > n_ctx_orig),
        sections=_sections(file) if running.rope_type in (MROPE, IMROPE) else None,
        interleaved=running.rope_type == IMROPE,
    )


def _windowed_layer(file: _File, full: LayerRope) -> LayerRope:
    """The rotation of the layers with a window, by that of the others."""
    known = WINDOWED[file.arch]
    head_dim = int(file.key("attention.key_length_swa", full.head_dim))
    n_rot = full.n_rot
    if file.arch in OWN_N_ROT:
        n_rot = int(file.key("rope.dimension_count", full.head_dim))
        n_rot = int(file.key("rope.dimension_count_swa", n_rot))
    base, scale = full.freq_base, full.freq_scale
    if known.base != "full":
        default = _freq_base(file) if known.base == "file" else known.base
        base = float(file.key("rope.freq_base_swa", default))
    if known.scale != "full":
        scale = _freq_scale(file) if known.scale == "file" else 1.0
    return replace(
        full,
        head_dim=head_dim,
        n_rot=n_rot,
        freq_base=base,
        freq_scale=scale,
        ext_factor=full.ext_factor if known.has_yarn else 0.0,
        factors=None if file.arch in FULL_FACTORS else full.factors,
    )


def _freq_base(file: _File) -> float:
    return float(file.key("rope.freq_base", 10000.0))


def _freq_scale(file: _File) -> float:
    factor = float(file.key("rope.scaling.factor", file.key("rope.scale_linear", 0.0)))
    return 1.0 / factor if factor else 1.0


def _betas(file: _File) -> dict[str, float]:
    """The betas from the file, which only mistral3 uses."""
    if file.arch != "mistral3":
        return {}
    return {
        "beta_fast": float(file.key("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(file.key("rope.scaling.yarn_beta_slow", 1.0)),
    }


def _factors(file: _File, n_rot: int, is_long: bool) -> tuple[float, ...] | None:
    """The factors of the first `n_rot` / 2 pairs: step35 holds those of its windowed layers, too."""
    if file.arch not in WITH_FACTORS:
        return None
    chosen = "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
    found = file.floats("rope_freqs.weight") or file.floats(chosen)
    return found[: n_rot // 2] if found else None


def _sections(file: _File) -> Sections:
    sections = file.key("rope.dimension_sections", None)
    if not isinstance(sections, Sequence) or not 1 <= len(sections) <= 4:
        raise StateError("rope: the file has no usable rope.dimension_sections")
    time, height, width, other = (*(int(n) for n in sections), 0, 0, 0)[:4]
    return time, height, width, other


def _first(value: Any) -> int:
    """A count, or the first of one count per layer."""
    return int(value[0]) if isinstance(value, Sequence) and value else int(value or 0)
