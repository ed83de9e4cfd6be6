"""`towerctl bench quality`: what the stored formats cost."""

from __future__ import annotations
