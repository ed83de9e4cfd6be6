"""`towerctl bench transform`: rows in a transform coding, beside the block formats."""

from __future__ import annotations
