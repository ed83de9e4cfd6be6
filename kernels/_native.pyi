from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Arguments are checked in C++: any buffer of the right shape and format is taken.
def copy_planes(
    dst: Any,
    jobs: Sequence[tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]],
    n_threads: int = 1,
) -> None:
    """Copy the rows of every job (offset, rows, index) into dst."""

def gather_rows(
    src: npt.NDArray[np.uint8],
    index: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
    n_threads: int = 1,
) -> None:
    """out[i] = src[index[i]]."""

def transpose(
    src: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8],
    element_bytes: int,
    n_threads: int = 1,
) -> None:
    """out[c, r] = src[r, c] for elements of 1, 2 or 4 bytes."""
