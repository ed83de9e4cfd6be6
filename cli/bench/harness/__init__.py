"""What benchmarks share: servers, a client that times, a proxy of slots, models, options, reports, plots."""

from __future__ import annotations
