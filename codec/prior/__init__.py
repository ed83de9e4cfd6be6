"""What `mix` knows before it has seen anything: n-gram tables of the training corpus, trained
maps and weights, and the vocabulary that they are about, in one GGUF (`file.py`)."""

from __future__ import annotations
