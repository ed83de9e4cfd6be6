"""`towerctl bench longchat`: a bounded live cache beside the full one."""

from __future__ import annotations
