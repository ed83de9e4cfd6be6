"""`towerctl bench resume`: a stored session beside its prefill."""

from __future__ import annotations
