"""The one error of training."""

from __future__ import annotations

from towerd.errors import TowerdError


class TrainError(TowerdError):
    """Training cannot start or continue: no torch, no data, a foreign checkpoint or teacher."""
