"""What `mix` knows from the start: n-gram tables of the training corpus, trained maps and
weights, and their vocabulary, in one GGUF (`file.py`)."""

from __future__ import annotations
