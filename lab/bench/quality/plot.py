"""The plot of `towerctl bench quality`: drift against bits, and against attention mass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.plot import new_figure
from lab.bench.quality.drift import AttentionDrift, code_bits, families, normalised, points

_BINS = 24


def plot(drift: AttentionDrift, path: Path, title: str) -> None:
    """Write the plot."""
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    _against_bits(left, drift)
    _against_alpha(right, drift)
    figure.suptitle(f"Attention drift from quantized keys: {title}")
    figure.savefig(path, dpi=150)


def _against_bits(axes: Any, drift: AttentionDrift) -> None:
    labels = (("o", "with Hadamard"), ("s", "without"))
    for names, (marker, label) in zip(families(drift), labels, strict=True):
        if not names:
            continue
        found = sorted((code_bits(name), normalised(drift, name)) for name in names)
        bits, moved = zip(*found, strict=True)
        axes.semilogy(bits, moved, marker, base=2, label=label)
        if marker == "o":
            line = moved[0] * 2.0 ** (bits[0] - np.array(bits, float))
            axes.semilogy(bits, line, "k--", base=2, label="predicted slope, 2^-b")
    axes.set_xlabel("bits of a key's element")
    axes.set_ylabel("mean drift / (|k| |q| / sqrt(d) sqrt(alpha M))")
    axes.legend()


def _against_alpha(axes: Any, drift: AttentionDrift) -> None:
    alpha, moved, _ = points(drift)
    axes.loglog(alpha, moved, ".", markersize=2, alpha=0.3, label="heads and queries")
    edges = np.geomspace(alpha.min(), 1, _BINS + 1)
    which = np.clip(np.digitize(alpha, edges) - 1, 0, _BINS - 1)
    full = [i for i in range(_BINS) if (which == i).sum() >= 5]
    middle = np.sqrt(edges[:-1] * edges[1:])[full]
    axes.loglog(middle, [np.median(moved[which == i]) for i in full], "r-", label="median")
    axes.loglog(edges, np.sqrt(edges), "k--", label="Theorem 19, alpha^(1/2)")
    axes.set_xlabel("alpha: attention on the quantized segment")
    axes.set_ylabel("drift / (eps |q| / sqrt(d) sqrt(M))")
    axes.legend()
