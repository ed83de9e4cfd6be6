"""The laboratory, which no daemon imports: replays, baseline policies, training, studies.

It lies in a checkout of the repository, beside the package, and is not installed with it.
`towerctl lab` finds it. Its modules may import all of towerd; towerd imports none of them.
"""

from __future__ import annotations

import os

# On a CPU with AMX, PyTorch's bfloat16 products release the tile registers of the thread, and llama.cpp,
# which sets them up once for each thread (ggml-cpu/amx/mmq.cpp), ends with SIGILL at its next product.
# PyTorch's fused attention does so in spite of this: see lab/train/model/network.py.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
