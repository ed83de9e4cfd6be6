"""A request that takes whatever slot llama-server gives it."""

from __future__ import annotations

from towerd.engine.llama_server.slots.gate import Gate
from towerd.engine.llama_server.slots.upkeep import Upkeep


class Unpinned:
    """A request that llama-server places itself; see `LlamaServerEngine.unpinned`."""

    def __init__(self, gate: Gate, upkeep: Upkeep) -> None:
        self._gate = gate
        self._upkeep = upkeep
        self._is_launched = False

    def launched(self) -> None:
        """Its reply has begun: leases may be placed again, in other slots than its own."""
        if not self._is_launched:
            self._is_launched = True
            self._upkeep.doubt()
            self._gate.end_unpinned()
