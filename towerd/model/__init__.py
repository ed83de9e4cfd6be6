"""Reads what a GGUF says, for both engines: identity, vocabulary, RoPE, flags that change its rows."""
