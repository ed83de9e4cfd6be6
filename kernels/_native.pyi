from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def available() -> list[str]:
    """Names of the instruction sets that this machine has, best first."""

def formats() -> list[tuple[str, int, int, int, bool]]:
    """(name, type id, block elements, block bytes, rotated) of each format."""

# Arguments are checked in C++: any buffer of the right shape and format is taken.
class Kernels:
    """All kernels for one instruction set. ValueError if it is not available."""

    def __init__(self, name: str) -> None: ...
    @property
    def name(self) -> str: ...
    def copy_planes(
        self,
        dst: Any,
        jobs: Sequence[tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]],
        n_threads: int = 1,
    ) -> None:
        """Copy the rows of every job (offset, rows, index) into dst."""

    def gather_rows(
        self,
        src: npt.NDArray[np.uint8],
        index: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        n_threads: int = 1,
    ) -> None:
        """out[i] = src[index[i]]."""

    def transpose(
        self,
        src: npt.NDArray[np.uint8],
        out: npt.NDArray[np.uint8],
        element_bytes: int,
        n_threads: int = 1,
    ) -> None:
        """out[c, r] = src[r, c] for elements of 1, 2 or 4 bytes."""

    def transcode(
        self,
        dst: Any,
        jobs: Sequence[tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.int64] | None, str, str]],
        n_threads: int = 1,
    ) -> None:
        """Write the rows of every job (offset, rows, index, src_format, dst_format) into dst."""

    def rope_shift(
        self,
        src: npt.NDArray[np.uint8],
        out: npt.NDArray[np.uint8],
        format: str,
        cos: npt.NDArray[np.float32],
        sin: npt.NDArray[np.float32],
        row_table: npt.NDArray[np.int32] | None,
        head_dim: int,
        n_rot: int,
        first: int,
        neox: bool,
        hadamard_block: int,
        n_threads: int = 1,
    ) -> None:
        """Rotate the RoPE pairs of K rows."""

    def hadamard(
        self,
        src: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
        block: int,
        n_threads: int = 1,
    ) -> None:
        """Transform each run of `block` numbers."""
