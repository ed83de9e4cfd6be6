"""The input of trained predictors besides a step's name: an embedding of its meaning.

`lab` trains them on hashed words. The daemon's policies see names but no words, so there a
predictor is used without embeddings.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]
N_TEXT = 384
