"""The output of a benchmark: a table for people, then one JSON object on the last line."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Report:
    """Figures of one run. `targets` maps a key to (text, met)."""

    name: str
    model: str
    figures: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, tuple[str, bool]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """For the JSON line only; replaces figures of the same key."""

    def target(self, key: str, least: float | None = None, most: float | None = None) -> None:
        """Compare a figure with its target."""
        value = float(self.figures[key])
        if least is not None:
            self.targets[key] = (f">= {least:g}", value >= least)
        if most is not None:
            self.targets[key] = (f"<= {most:g}", value <= most)

    def show(self) -> None:
        """Print the table and the JSON line."""
        console = Console()
        table = Table(title=f"bench {self.name} ({self.model}; {machine()})")
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("target")
        for key, value in self.figures.items():
            text, met = self.targets.get(key, ("", True))
            mark = f"{text} {'met' if met else 'MISSED'}" if text else ""
            table.add_row(key, _format(value), mark)
        console.print(table)
        print(json.dumps(self.as_json()), flush=True)

    def as_json(self) -> Mapping[str, Any]:
        missed = [key for key, (_, met) in self.targets.items() if not met]
        return {
            "bench": self.name,
            "model": self.model,
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            **self.figures,
            **self.details,
            "missed": missed,
        }


def machine() -> str:
    """The CPU model and core count of this machine."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name}, {psutil.cpu_count()} cores"


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
