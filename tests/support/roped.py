"""Random-weight models with every kind of RoPE, in real llama.cpp contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
from any_arch import make_arch_gguf
from gguf import GGMLQuantizationType, quants

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.memory import open_memory
from towerd.model.llama_model import LlamaModel
from towerd.model.rope import Running, read_rope
from towerd.settings.config import Config
from towerd.slots.blob import emit_blob
from towerd.slots.layout import Plane
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.tokens import Ids

Values = npt.NDArray[np.float64]
N_CELLS = 2048
BASE = Shape(
    2, 256, 4, 2, 256, 448, n_ctx_train=4096, ftype="F32", rope_freq_base=10000.0
)  # heads of 64: quantized keys are Hadamard-rotated
SHAPES: dict[str, Shape] = {
    "llama": BASE,
    "linear": replace(BASE, rope_scaling="linear"),
    "yarn": replace(BASE, rope_scaling="yarn"),
    "llama3": replace(BASE, rope_scaling="llama3"),
    "qwen3": replace(BASE, arch="qwen3"),
    "qwen3-yarn": replace(BASE, arch="qwen3", rope_scaling="yarn"),
    "phi3": replace(BASE, arch="phi3"),
    "phi3-long": replace(BASE, arch="phi3", rope_scaling="longrope"),
    "phi3-short": replace(BASE, arch="phi3", rope_scaling="longrope", n_ctx_train=16384),
    "stablelm": replace(BASE, arch="stablelm"),
    "gptneox": replace(BASE, arch="gptneox", n_head_kv=4),
    "smollm3": replace(BASE, arch="smollm3", n_layer=4),
    "qwen2vl": replace(BASE, arch="qwen2vl"),
    "qwen3vl": replace(BASE, arch="qwen3vl"),
    "deepseek2": replace(BASE, arch="deepseek2"),
    "deepseek2-yarn": replace(BASE, arch="deepseek2", rope_scaling="yarn"),
}
HYBRIDS: dict[str, Shape] = {
    "lfm2": replace(BASE, arch="lfm2", n_layer=4),
    "granitehybrid": replace(BASE, arch="granitehybrid", n_layer=4),
    "falcon-h1": replace(BASE, arch="falcon-h1"),
    "jamba": replace(BASE, arch="jamba", n_layer=4),
    "qwen35": replace(BASE, arch="qwen35", n_layer=4),
}
"""The rows of their attention layers."""
_OWN_BASE = {"rope.freq_base": 500000.0, "rope.freq_base_swa": 20000.0}
_LINEAR = {"rope.freq_base": 500000.0, "rope.scaling.factor": 4.0}
_YARN: dict[str, Any] = {
    **_LINEAR,
    "rope.scaling.type": "yarn",
    "rope.scaling.original_context_length": 512,
}
_LISTED = {"attention.sliding_window_pattern": [1, 0, 1, 1]}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {"block_count": 6, "leading_dense_block_count": 2, **_LINEAR}),
    "cohere2": ("cohere2", _LISTED | _LINEAR),
    "cohere2moe": ("cohere2moe", {"rope.freq_base_swa": 77.0}),
    "exaone-moe": ("exaone-moe", _LINEAR),
    "exaone4": ("exaone4", {"rope.freq_base_swa": 77.0}),
    "exaone4-windowed": ("exaone4", {"block_count": 64, "rope.freq_base_swa": 77.0}),
    "gemma2": ("gemma2", _OWN_BASE),
    "gemma2-linear": ("gemma2", {**_LINEAR, "rope.scaling.type": "none"}),
    "gemma3": ("gemma3", {"block_count": 7, **_LINEAR}),
    "gemma3-listed": ("gemma3", _LISTED | _OWN_BASE),
    "gemma3-dense": ("gemma3", {"attention.sliding_window": 0, **_LINEAR}),
    "gemma3n": ("gemma3n", {"block_count": 22, "rope.freq_base": 1e6}),
    "gemma4": (
        "gemma4",
        {
            "block_count": 6,
            "attention.sliding_window_pattern": [0, 1, 1, 0, 1, 0],
            "attention.shared_kv_layers": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "embedding_length_per_layer_input": 32,
            "rope.dimension_count": 64,
            "rope.dimension_count_swa": 32,
            "rope.freq_base": 1e6,
        },
    ),
    "gpt-oss": ("gpt-oss", _YARN),
    "gpt-oss-listed": ("gpt-oss", _LISTED | _OWN_BASE),
    "granite_swa": ("granite_swa", _LISTED | _LINEAR | {"attention.rope_pattern": [1, 1, 0, 1]}),
    "laguna": ("laguna", {**_YARN, "rope.dimension_count": 16, "rope.dimension_count_swa": 32}),
    "maple": ("maple", _LISTED | _LINEAR | {"swiglu_clamp_exp": 7.0}),
    "mellum": ("mellum", _YARN),
    "mimo2": ("mimo2", _LISTED | _LINEAR | {"rope.dimension_count": 16}),
    "muse-glimmer": ("muse-glimmer", _LINEAR),
    "olmo2": ("olmo2", {"attention.sliding_window": 0, **_YARN}),
    "olmo2-windowed": ("olmo2", _YARN),
    "plamo3": ("plamo3", {"block_count": 8, **_LINEAR}),
    "smallthinker": ("smallthinker", {"block_count": 6, **_LINEAR}),
    "smallthinker-4": ("smallthinker", _LINEAR),
    "smallthinker-dense": ("smallthinker", {"attention.sliding_window": 0, "block_count": 5}),
    "spark2_5": ("spark2_5", _LISTED | _OWN_BASE | {"rope.dimension_count_swa": 16}),
    "step35": ("step35", _LISTED | _LINEAR),
}
"""An architecture and keys of its metadata; four layers and a window of 48 if they do not say."""


def some_ids(n: int, seed: int = 0) -> Ids:
    """Ordinary tokens of the synthetic vocabulary."""
    return np.random.default_rng(seed).integers(300, 448, n).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Fresh:
    """What one decode left: its rows and the logits after its last token."""

    rows: KVRows
    logits: npt.NDArray[np.float32]


class Roped:
    """A model of `SHAPES`, `HYBRIDS` or `WINDOWED` with a context of 2048 cells whose K has a given type."""

    def __init__(self, folder: Path, name: str, k: str = "f16", **settings: Any) -> None:
        path = folder / f"{name}.gguf"
        if not path.exists():
            if name in SHAPES | HYBRIDS:
                make_random_gguf(path, (SHAPES | HYBRIDS)[name])
            else:
                make_arch_gguf(path, *WINDOWED[name])
        is_latent = name.startswith("deepseek")  # K is V there: one type
        values: dict[str, Any] = {
            "cache_type_k": k,
            "cache_type_v": k if is_latent else "f16",
            "threads": 1,
        }
        config = Config(model=path, flash_attn="on", **(values | settings))
        self.model = LlamaModel(path, config)
        self.context = LlamaContext(self.model, config, n_cells=N_CELLS, n_seqs=3)
        self.memory = open_memory(self.context, self.model)
        self.rot_k = k.startswith("q")
        self.rope: Rope = read_rope(
            path,
            Running(
                rope_type=int(lib.llama_model_rope_type(self.model.ptr)),
                n_ctx_seq=self.context.n_cells,
                freq_base=config.rope_freq_base,
                freq_scale=config.rope_freq_scale,
            ),
        )

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def fresh(self, ids: Ids, at: int) -> Fresh:
        """Decode `ids` as a sequence that begins at position `at`."""
        self.memory.seq_rm(0)
        return self._decoded(ids, at)

    def continued(self, parts: list[KVRows], ids: Ids) -> Fresh:
        """Restore consecutive rows, decode `ids` after them; the rows of `ids` alone."""
        self.memory.seq_rm(0)
        self.memory.append(0, np.frombuffer(emit_blob(parts), np.uint8), is_empty=True)
        return self._decoded(ids, parts[-1].p1)

    def _decoded(self, ids: Ids, at: int) -> Fresh:
        last = self.context.batch.add(ids, at, 0, logits_last=True)
        self.context.decode()
        logits = self.context.logits(last).copy()
        rows = self.memory.rows(0, at, at + len(ids))
        assert rows is not None
        return Fresh(rows.copy(), logits)


def values_of(plane: Plane, rows: npt.NDArray[np.uint8]) -> Values:
    """float64[n, elements] as gguf reads them."""
    kind = GGMLQuantizationType(plane.format.ggml_type)
    stored = np.ascontiguousarray(rows)
    if kind in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
        return stored.view(np.float16 if kind == GGMLQuantizationType.F16 else np.float32).astype(
            np.float64
        )
    return quants.dequantize(stored, kind).astype(np.float64)


def keys_of(rows: KVRows, layer: int) -> Values:
    """float64[n, elements]: one layer's keys as they are stored."""
    return values_of(rows.layout.k[layer], rows.k[layer])


def relative(difference: Values, reference: Values) -> tuple[float, float]:
    """(RMS of the difference / RMS, largest difference / largest value)."""
    rms = float(np.sqrt((difference**2).mean() / (reference**2).mean()))
    return rms, float(np.abs(difference).max() / np.abs(reference).max())
