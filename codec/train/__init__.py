"""Training of the codec's small language model, from chat records to a GGUF (README.md). Only
`towerctl train` imports this package: it needs torch, which the daemon does not.
"""

from __future__ import annotations
