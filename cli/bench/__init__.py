"""The two benchmarks of the README, which a person can run on their own machine and model."""

from __future__ import annotations
