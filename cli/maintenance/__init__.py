"""Commands on a whole store: statistics, verification, removal, calibration."""

from __future__ import annotations
