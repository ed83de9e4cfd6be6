"""The training loop: steps, optimizer, schedule, and what is kept of a run."""

from __future__ import annotations
