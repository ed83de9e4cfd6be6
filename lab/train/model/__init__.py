"""The network: its arithmetic, its initial weights, reading and writing GGUFs."""

from __future__ import annotations
