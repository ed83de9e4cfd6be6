"""Benchmarks that a person can run on their own machine and model: `towerctl bench NAME`."""

from __future__ import annotations
