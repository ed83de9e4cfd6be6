"""Random-weight models with every kind of RoPE, in real llama.cpp contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.engine.embedded.context.context import LlamaContext
from towerd.model.llama_model import LlamaModel
from towerd.model.rope import Running, read_rope
from towerd.settings.config import Config
from towerd.slots.blob import emit_blob, parse_blob
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


def some_ids(n: int, seed: int = 0) -> Ids:
    """Ordinary tokens of the synthetic vocabulary."""
    return np.random.default_rng(seed).integers(300, 448, n).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Fresh:
    """What one decode left: its rows and the logits after its last token."""

    rows: KVRows
    logits: npt.NDArray[np.float32]


class Roped:
    """A model of `SHAPES` with a context of 2048 cells whose K has a given type."""

    def __init__(self, folder: Path, name: str, k: str = "f16", **settings: Any) -> None:
        path = folder / f"{name}.gguf"
        if not path.exists():
            make_random_gguf(path, SHAPES[name])
        is_latent = name.startswith("deepseek")  # K is V there: one type
        values: dict[str, Any] = {
            "cache_type_k": k,
            "cache_type_v": k if is_latent else "f16",
            "threads": 1,
        }
        config = Config(model=path, flash_attn="on", **(values | settings))
        self.model = LlamaModel(path, config)
        self.context = LlamaContext(self.model, config, n_cells=N_CELLS, n_seqs=2)
        self.rot_k = k.startswith("q")
        self.rope: Rope = read_rope(
            path,
            Running(
                rope_type=int(lib.llama_model_rope_type(self.model.ptr)),
                n_ctx_seq=self.context.n_cells,
                n_swa=self.model.n_swa,
                freq_base=config.rope_freq_base,
                freq_scale=config.rope_freq_scale,
            ),
        )

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def fresh(self, ids: Ids, at: int) -> Fresh:
        """Decode `ids` as a sequence that begins at position `at`."""
        self.context.seq_rm(0)
        return self._decoded(ids, at)

    def continued(self, parts: list[KVRows], ids: Ids) -> Fresh:
        """Restore consecutive rows, decode `ids` after them; the rows of `ids` alone."""
        self.context.seq_rm(0)
        self.context.set_state(0, np.frombuffer(emit_blob(parts), np.uint8))
        return self._decoded(ids, parts[-1].p1)

    def _decoded(self, ids: Ids, at: int) -> Fresh:
        last = self.context.batch.add(ids, at, 0, logits_last=True)
        self.context.decode()
        logits = self.context.logits(last).copy()
        rows = parse_blob(self.context.get_state(0), cell_ext=self.rope.is_multi).rows
        return Fresh(rows.slice(at, at + len(ids)).copy(), logits)


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
