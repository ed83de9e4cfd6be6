"""What benchmarks share: servers, a client that times, models, reports, plots."""

from __future__ import annotations
