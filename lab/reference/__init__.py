"""The kernels in numpy, which the tests compare the C++ with; `towerd.kernels.dispatch` says what each does.

The C++ versions have the same signatures and check every argument; here arguments are taken as they
are, and `n_threads` has no meaning. What depends on the numbers, as rows that are not finite, is
refused here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.reference.attention import attention_mass as attention_mass
from lab.reference.rope import rope_shift as rope_shift
from lab.reference.transcode import transcode as transcode
from lab.reference.transcode import transcoded as transcoded
from towerd.kernels.arrays import Job


def copy_planes(dst: Any, jobs: Sequence[Job], n_threads: int = 1) -> None:
    """See `dispatch.copy_planes`."""
    for offset, rows, index in jobs:
        taken = rows if index is None else rows[index]
        dst[offset : offset + taken.size].reshape(taken.shape)[:] = taken
