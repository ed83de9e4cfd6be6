"""`towerctl lab bench kernels`: the kernels beside memcpy and ggml."""

from __future__ import annotations
