"""`towerctl lab bench latem`: LATEM beside the bounds of its paper."""

from __future__ import annotations
