"""`towerctl lab bench agents`: many agents in a small cache."""

from __future__ import annotations
