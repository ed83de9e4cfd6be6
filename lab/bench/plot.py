"""Plots: whether one can be written, and an empty figure."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from towerd.errors import ConfigError

SUFFIXES = (".png", ".svg")


def require(path: Path) -> None:
    """Raises ConfigError unless a plot can be written to `path`: checks its suffix, its folder and
    matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder.")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: install towerd with its extra, pip install 'towerd[bench]'."
        ) from error


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, sizes in inches.

    Without pyplot there is no window and no global state, whatever the user's backend."""
    figure = importlib.import_module("matplotlib.figure").Figure
    return figure(figsize=(width, height), layout="constrained")
