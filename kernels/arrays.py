"""Types of the arrays and jobs that kernels take."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Index: TypeAlias = npt.NDArray[np.int64]
Lines: TypeAlias = npt.NDArray[np.int32]
Job: TypeAlias = tuple[int, Bytes, Index | None]
"""(offset in dst, rows uint8[n, row_bytes], int64[m] row numbers to take or None for all)."""
TranscodeJob: TypeAlias = tuple[int, Bytes, Index | None, str, str]
"""(offset in dst, rows uint8[n, row_bytes], int64[m] row numbers to take or None for all,
format of the rows, format to write)."""
