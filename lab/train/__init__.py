"""Training of the codec's small language model, from chat records to a GGUF (README.md)."""
