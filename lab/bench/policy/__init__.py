"""`towerctl lab bench policy`: eviction policies on recorded traces."""

from __future__ import annotations
