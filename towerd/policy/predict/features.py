"""The input of trained predictors besides a step's name: an embedding of its meaning.

The laboratory trains them on hashed words. What the daemon's policies hear has names and no words,
so there a predictor is asked without.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]
N_TEXT = 384
