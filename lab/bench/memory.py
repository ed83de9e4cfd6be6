"""`towerctl bench memory`: resident memory of towerd and of llama-server, idle and with forty chats.

Both serve the same model with the same context size; everything else is their default. The chats are
those of `bench switch`, with one switch each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from towerd.cli.bench.harness.models import bench_model, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.switch import (
    QUICK,
    Outcome,
    SwitchLoad,
    drive_llama_server,
    drive_towerd,
)


async def run(model: Path | None, quick: bool) -> Report:
    """Run one load on each server, with its memory measured before and after."""
    path = bench_model(model, "small" if quick else "1b")
    load = replace(QUICK if quick else SwitchLoad(), rounds=1, restart_chats=1)
    n_vocab = vocab_size(path)
    ours = await drive_towerd(path, load, n_vocab, "embedded")
    theirs = await drive_llama_server(path, load, n_vocab)
    report = Report("memory", path.name)
    report.figures |= {
        "chats": load.chats,
        **_sizes("towerd", ours),
        **_sizes("llama_server", theirs),
        "idle_ratio": ours.idle_rss_bytes / theirs.idle_rss_bytes,
        "chats_ratio": ours.rss_bytes / theirs.rss_bytes,
    }
    report.target("idle_ratio", most=1.2)
    report.target("chats_ratio", most=1.3)
    return report


def _sizes(name: str, outcome: Outcome) -> dict[str, int]:
    return {
        f"{name}_idle_rss_bytes": outcome.idle_rss_bytes,
        f"{name}_chats_rss_bytes": outcome.rss_bytes,
    }
