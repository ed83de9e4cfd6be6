"""What `towerctl doctor` looks at, one file per part of the installation."""

from __future__ import annotations
