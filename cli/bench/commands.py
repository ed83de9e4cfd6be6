"""The commands `towerctl bench NAME`; each imports its benchmark when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.bench.harness.command import (
    FILE,
    MODEL,
    QUICK,
    plot_option,
    run_benchmark,
    trained_model_option,
)
from towerd.cli.lazy import Group
from towerd.settings.config import ENGINES

if TYPE_CHECKING:
    from towerd.cli.bench.harness.report import Report

PACKAGE = "towerd.cli.bench"
MOVED = ("agents", "anticipation", "codec", "footprint", "kernels", "latem", "policy", "splice")
"""Benchmarks that are now under `towerctl lab bench`."""


@click.group(cls=Group, moved={name: f"towerctl lab bench {name}" for name in MOVED})
def bench() -> None:
    """Measure on this machine; the last line printed is one JSON object."""


@bench.command()
@MODEL
@QUICK
@click.option(
    "--tokens",
    type=click.IntRange(64, 131072),
    default=2048,
    show_default=True,
    help="Length of the stored session.",
)
@click.option(
    "--level-formats",
    default=None,
    help="Store it in these formats before resuming, such as 0=q8h; default: native.",
)
@click.option(
    "--arch", default=None, help="Measure random weights of this architecture, or of all of them."
)
def resume(
    model: Path | None, quick: bool, tokens: int, level_formats: str | None, arch: str | None
) -> None:
    """Time to resume a stored session to its first token, against prefilling it."""
    if arch is not None:
        if model is not None or level_formats is not None:
            raise click.UsageError("--arch goes with --quick and --tokens only.")
        _run("resume.architectures", None, quick, arch=arch, tokens=tokens)
        return
    _run("resume.session", model, quick, tokens=tokens, level_formats=level_formats)


@bench.command()
@MODEL
@QUICK
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=None,
    help="How often every chat is continued; default 3, with --quick 2.",
)
@click.option(
    "--chats",
    type=click.IntRange(2, 1000),
    default=None,
    help="How many chats there are; default 40, with --quick 10.",
)
@click.option(
    "--engine",
    type=click.Choice((*ENGINES, "both")),
    default="embedded",
    show_default=True,
    help="towerd's engine; llama-server: in front of one.",
)
@click.option(
    "--rival",
    type=click.Choice(("llama-server", "slot-proxy", "both")),
    default="llama-server",
    show_default=True,
    help="What to compare with; slot-proxy: a proxy that saves whole slots.",
)
def switch(
    model: Path | None, quick: bool, rounds: int | None, chats: int | None, engine: str, rival: str
) -> None:
    """Forty chats over one base, round robin, against llama-server's defaults."""
    _run("switch", model, quick, rounds=rounds, chats=chats, engine=engine, rival=rival)


@bench.command()
@MODEL
@QUICK
def memory(model: Path | None, quick: bool) -> None:
    """Resident memory, idle and with the forty chats of `switch`, beside llama-server's."""
    _run("memory", model, quick)


@bench.command()
@MODEL
@QUICK
def concurrency(model: Path | None, quick: bool) -> None:
    """Tokens per second at 1, 2, 4 and 8 streams, against llama-server with the same flags."""
    _run("concurrency", model, quick)


@bench.command()
@MODEL
@QUICK
def tools(model: Path | None, quick: bool) -> None:
    """Three agents with thirty tools each, in turn, against llama-server's defaults."""
    _run("tools", model, quick)


@bench.command()
@QUICK
def models(quick: bool) -> None:
    """Two models in turn, with room for one, against llama-server's router."""
    _run("models", None, quick)


@bench.command()
@MODEL
@QUICK
def proxy(model: Path | None, quick: bool) -> None:
    """The latency that towerd adds in front of a llama-server, at 1 and 32 streams."""
    _run("proxy", model, quick)


@bench.command()
@trained_model_option("GGUF to serve")
@QUICK
def soak(model: Path | None, quick: bool) -> None:
    """10,000 short requests under budgets that are far too small: the daemon's resource use."""
    report = _run("soak", model, quick)
    if report.figures["failed"] or "stopped" in report.figures:
        raise click.exceptions.Exit(1)


@bench.command()
@QUICK
def store(quick: bool) -> None:
    """Load time, look-up time and size of a store of 100,000 segments."""
    _run("store", None, quick)


@bench.command()
@trained_model_option("Trained GGUF to measure")
@click.option(
    "--text",
    type=FILE,
    help="UTF-8 text to measure on; default: the one that calibration uses.",
)
@plot_option("Write the plot of attention drift")
@QUICK
def quality(model: Path | None, text: Path | None, plot_path: Path | None, quick: bool) -> None:
    """What the stored formats cost: perplexity, KL divergence, attention drift and its bound."""
    _run("quality.formats", model, quick, text=text, plot_path=plot_path)


@bench.command()
@trained_model_option("GGUF to evaluate thawed sessions with")
@click.option(
    "--data",
    type=FILE,
    help="Chat records; those from sources that the codec was not trained on are used.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=FILE,
    help="UTF-8 text to take sessions from, may be .zst; repeatable.",
)
@click.option(
    "--meetings",
    type=FILE,
    help="QMSum's meetings, qmsum.jsonl.zst, to take sessions from.",
)
@click.option(
    "--vocab",
    type=FILE,
    help="GGUF whose tokenizer encodes the sessions; then nothing is evaluated.",
)
@QUICK
def cold(
    model: Path | None,
    data: Path | None,
    texts: tuple[Path, ...],
    meetings: Path | None,
    vocab: Path | None,
    quick: bool,
) -> None:
    """Frozen sessions: bytes per session of 100,000, and the time to find and thaw one."""
    _run("cold", model, quick, data=data, texts=texts, meetings=meetings, vocab=vocab)


@bench.command()
@trained_model_option("GGUF to measure, a trained one")
@click.option(
    "--text",
    type=FILE,
    help="UTF-8 text to read, may be .zst; default: the package's sample of chat.",
)
@click.option(
    "--meetings",
    type=FILE,
    help="QMSum's meetings, qmsum.jsonl.zst, to read as well.",
)
@click.option(
    "--pairs",
    type=FILE,
    help="Key-value examples of Lost in the Middle, .jsonl.zst, for retrieval.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Instead: time per token in the daemon, IceCache beside the full cache.",
)
@QUICK
def longchat(
    model: Path | None,
    text: Path | None,
    meetings: Path | None,
    pairs: Path | None,
    live: bool,
    quick: bool,
) -> None:
    """What a bounded live cache costs, per retention policy, beside the full cache."""
    if live:
        if any(path is not None for path in (text, meetings, pairs)):
            raise click.UsageError("--live goes with --model and --quick only.")
        _run("longchat.live", model, quick)
        return
    _run("longchat.policies", model, quick, text=text, meetings=meetings, pairs=pairs)


def _run(name: str, model: Path | None, quick: bool, **options: Any) -> Report:
    return run_benchmark(f"{PACKAGE}.{name}", model, quick, **options)
