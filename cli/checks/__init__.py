"""The checks of `towerctl doctor`, one file per part of the installation."""

from __future__ import annotations
