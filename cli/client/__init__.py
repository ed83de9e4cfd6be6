"""The client side of towerctl: what it talks to, and how."""

from __future__ import annotations
