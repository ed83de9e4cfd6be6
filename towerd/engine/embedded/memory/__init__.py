"""What llama.cpp keeps of a sequence, by kind: rows, rows behind a window, recurrent states."""

from towerd.engine.embedded.memory.base import Memory
from towerd.engine.embedded.memory.factory import n_seqs_of, open_memory, state_bytes
from towerd.engine.embedded.memory.plain import PlainMemory

__all__ = ["Memory", "PlainMemory", "n_seqs_of", "open_memory", "state_bytes"]
