"""UnpinnedRequest: a request that runs in whichever slot llama-server picks."""

from __future__ import annotations

from towerd.engine.llama_server.slots.launch_gate import LaunchGate
from towerd.engine.llama_server.slots.slot_upkeep import SlotUpkeep


class UnpinnedRequest:
    """A request that llama-server places itself; see `LlamaServerEngine.unpinned`."""

    def __init__(self, gate: LaunchGate, upkeep: SlotUpkeep) -> None:
        self._gate = gate
        self._upkeep = upkeep
        self._is_launched = False

    def launched(self) -> None:
        """Called when its reply begins: leases may be placed again, in other slots."""
        if not self._is_launched:
            self._is_launched = True
            self._upkeep.doubt()
            self._gate.end_unpinned()
