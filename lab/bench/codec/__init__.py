"""`towerctl lab bench codec`: our blobs beside general-purpose compressors."""

from __future__ import annotations
