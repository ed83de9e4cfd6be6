"""The choice between llama.cpp's two attention implementations.

llama.cpp's own "auto" takes flash attention wherever it exists. On CPUs that is slower for
everything but long prompts: its kernel visits a query's keys one at a time unless a batch has 64
queries. Measured on the 1B shape in Q8_0 with an f16 cache (2 cores of a Xeon with AMX,
2026-11-21), seconds for one batch, flash attention on / off:

    tokens   depth 2,048     depth 8,192
    1        0.096 / 0.059   0.334 / 0.107
    9        0.536 / 0.131   2.131 / 0.310
    64       0.496 / 0.528   1.415 / 1.539
    512      4.681 / 4.375   11.70 / 12.59

Without flash attention every token of a batch is scored against every cell in use, those of other
sequences included. The scheduler therefore keeps few idle cells, and the scores need memory.
"""

from __future__ import annotations

from towerd.llama_library import lib
from towerd.settings.config import UNQUANTIZED, Config

_SCORE_BYTES = 4
_SCORES_RAM_SHARE = 8
"""The scores of one batch may take at most 1 / _SCORES_RAM_SHARE of RAM."""


def flash_attention(config: Config, *, n_head: int, n_cells: int, ram_bytes: int) -> str:
    """Return `on`, `off` or, to let llama.cpp decide, `auto`.

    n_head: query heads of the widest layer; n_cells: cells of the context"""
    if config.flash_attn != "auto":
        return config.flash_attn
    on_gpu = config.gpu_layers != 0 and lib.llama_supports_gpu_offload()
    if on_gpu or config.cache_type_v not in UNQUANTIZED:
        return "auto"
    scores_bytes = config.ubatch_size * n_cells * n_head * _SCORE_BYTES
    return "off" if scores_bytes <= ram_bytes // _SCORES_RAM_SHARE else "auto"
