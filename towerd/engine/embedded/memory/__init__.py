"""What llama.cpp keeps of a sequence, by kind: rows, rows behind a window, recurrent states."""

from towerd.engine.embedded.memory.base import SequenceMemory
from towerd.engine.embedded.memory.factory import n_seqs_of, open_memory, state_bytes
from towerd.engine.embedded.memory.plain import PlainMemory

__all__ = ["SequenceMemory", "PlainMemory", "n_seqs_of", "open_memory", "state_bytes"]
