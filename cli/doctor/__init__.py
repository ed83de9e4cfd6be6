"""`towerctl doctor`, and its checks: one file per part of the installation."""

from __future__ import annotations
