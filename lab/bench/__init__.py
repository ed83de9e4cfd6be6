"""Benchmarks of studies and of parts: `towerctl lab bench NAME`."""

from __future__ import annotations
