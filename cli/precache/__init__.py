"""`towerctl precache`, and the file that it reads."""

from __future__ import annotations
