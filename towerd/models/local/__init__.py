"""Models on this machine: where programs keep GGUFs, what their headers say, and their names."""

from __future__ import annotations
