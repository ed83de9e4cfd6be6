"""The commands `towerd` and `towerctl`: one file per command, imported only when it runs."""

from __future__ import annotations
