"""What moved rows win when prompts change in the middle: sessions, changes, distances, the benchmark."""

from __future__ import annotations
