"""Benchmarks that a person can run on their own machine and model: `towerctl bench NAME`."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.config import ENGINES
from towerd.policy import NAMES as POLICIES

if TYPE_CHECKING:
    from towerd.cli.bench.report import Report

_MODEL = click.option(
    "--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF to measure; default: random weights of the 1B shape (written once).",
)  # fmt: skip
_QUICK = click.option("--quick", is_flag=True, help="A smaller shape; about two minutes.")


@click.group()
def bench() -> None:
    """Measure on this machine; the last line printed is one JSON object."""


@bench.command()
@_MODEL
@_QUICK
@click.option("--tokens", type=click.IntRange(64, 131072), default=2048, show_default=True,
              help="Length of the stored session.")  # fmt: skip
@click.option("--level-formats", default=None,
              help="Store it in these formats first, such as 0=q8h; default: native.")  # fmt: skip
@click.option("--arch", default=None,
              help="Measure random weights of this architecture, or of all of them.")  # fmt: skip
def resume(
    model: Path | None, quick: bool, tokens: int, level_formats: str | None, arch: str | None
) -> None:
    """A stored session back to its first token, against prefilling it."""
    if arch is not None:
        if model is not None or level_formats is not None:
            raise click.UsageError("--arch goes with --quick and --tokens only.")
        report = asyncio.run(
            importlib.import_module("towerd.cli.bench.resume_arch").run(arch, quick, tokens)
        )
        report.show()
        return
    _run("resume", model, quick, tokens=tokens, level_formats=level_formats)


@bench.command()
@_MODEL
@_QUICK
@click.option("--rounds", type=click.IntRange(1, 100), default=None,
              help="How often every chat is continued; default 3, with --quick 2.")  # fmt: skip
@click.option("--chats", type=click.IntRange(2, 1000), default=None,
              help="How many chats there are; default 40, with --quick 10.")  # fmt: skip
@click.option("--engine", type=click.Choice((*ENGINES, "both")), default="embedded",
              show_default=True, help="towerd's engine; llama-server: in front of one.")  # fmt: skip
@click.option("--rival", type=click.Choice(("llama-server", "slot-proxy", "both")),
              default="llama-server", show_default=True,
              help="Whom to compare with; slot-proxy: one that saves whole slots.")  # fmt: skip
def switch(
    model: Path | None, quick: bool, rounds: int | None, chats: int | None, engine: str, rival: str
) -> None:
    """Forty chats over one base, round robin, against llama-server's defaults."""
    _run("switch", model, quick, rounds=rounds, chats=chats, engine=engine, rival=rival)


@bench.command()
@_MODEL
@_QUICK
def concurrency(model: Path | None, quick: bool) -> None:
    """Tokens a second at 1, 2, 4 and 8 streams, against llama-server with the same flags."""
    _run("concurrency", model, quick)


@bench.command()
@_MODEL
@_QUICK
def tools(model: Path | None, quick: bool) -> None:
    """Three agents with thirty tools each, in turn, against llama-server's defaults."""
    _run("tools", model, quick)


@bench.command()
@_MODEL
@_QUICK
def proxy(model: Path | None, quick: bool) -> None:
    """What towerd before a llama-server adds to its times, at 1 and 32 streams."""
    _run("proxy", model, quick)


@bench.command()
@click.option("--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF to serve; default: the bundled model.")  # fmt: skip
@_QUICK
def soak(model: Path | None, quick: bool) -> None:
    """10,000 short requests under budgets that are far too small: what the daemon takes."""
    report = _run("soak", model, quick)
    if report.figures["failed"] or "stopped" in report.figures:
        raise click.exceptions.Exit(1)


@bench.command()
@_QUICK
def store(quick: bool) -> None:
    """Load time, look-up time and size of a store of 100,000 segments."""
    _run("store", None, quick)


@bench.command()
@click.option("--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF to measure, a trained one; default: the bundled model.")  # fmt: skip
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="UTF-8 text to measure on; default: the one that calibration uses.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write the plot of attention drift here, as .png or .svg.")  # fmt: skip
@_QUICK
def quality(model: Path | None, text: Path | None, plot_path: Path | None, quick: bool) -> None:
    """What the stored formats cost: perplexity, KL divergence, attention drift and its bound."""
    _run("quality", model, quick, text=text, plot_path=plot_path)


@bench.command()
@click.option("--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF to measure, a trained one; default: the bundled model.")  # fmt: skip
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="UTF-8 text to cut modules from; default: the one of calibration.")  # fmt: skip
@_QUICK
def splice(model: Path | None, text: Path | None, quick: bool) -> None:
    """What a module costs in quality, and saves in time, wherever it is spliced in."""
    _run("splice", model, quick, text=text)


@bench.command()
@_QUICK
def kernels(quick: bool) -> None:
    """GB/s of every kernel, beside memcpy and ggml's own routines."""
    _run("kernels", None, quick)


@bench.command()
@click.option("--level-formats", default="0=q4h,1=q6h,2=q8", show_default=True,
              help="The stored format of each level.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write the curve here, as .png or .svg.")  # fmt: skip
@_QUICK
def footprint(quick: bool, level_formats: str, plot_path: Path | None) -> None:
    """Disk per session in a hierarchy of shared bases, against one slot file per session."""
    _run("footprint", None, quick, level_formats=level_formats, plot_path=plot_path)


@bench.command()
@click.option("--data",
              type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder of traces: agentic_coding/, mooncake_conversation.jsonl.zst, ...; "
                   "default: none are measured.")  # fmt: skip
@click.option("--workflows", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder of agent workflows, *.jsonl.zst; default: none are measured.")  # fmt: skip
@click.option("--policy", "policies", multiple=True, help="Measure this policy, too.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write hit rates over time and against capacity here, as .png or .svg.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True,
              help="Processes that replay side by side.")  # fmt: skip
@_QUICK
def policy(
    data: Path | None, workflows: Path | None, policies: tuple[str, ...], plot_path: Path | None,
    jobs: int, quick: bool,
) -> None:  # fmt: skip
    """What each eviction policy finds of recorded traces, beside LRU and the best possible."""
    _run(
        "policy", None, quick, data=data, policies=policies, workflows=workflows,
        plot_path=plot_path, jobs=jobs,
    )  # fmt: skip


@bench.command()
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write cost against wrong advice here, as .png or .svg.")  # fmt: skip
@_QUICK
def latem(quick: bool, plot_path: Path | None) -> None:
    """What LATEM pays over the optimum as predictions get worse, beside its paper's bounds."""
    _run("latem", None, quick, plot_path=plot_path)


@bench.command()
@click.option("--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF to measure with; default: the bundled model.")  # fmt: skip
@_QUICK
def anticipation(model: Path | None, quick: bool) -> None:
    """What the next turn of a reasoning chat has to evaluate, with and without anticipation."""
    _run("anticipation", model, quick)


@bench.command()
@_MODEL
@_QUICK
@click.option("--policy", type=click.Choice(POLICIES), default=None,
              help="The policy to hold against LRU; default: the daemon's.")  # fmt: skip
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=None,
              help="Of all distinct tokens, what fits; default 0.23, with --quick 0.17.")  # fmt: skip
def agents(model: Path | None, quick: bool, policy: str | None, share: float | None) -> None:
    """72 agents in a daemon with room for a few: time to first token, against LRU."""
    _run("agents", model, quick, policy=policy, share=share)


@bench.command()
@click.option("--data", required=True,
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Chat records to measure on (dev.jsonl.zst), beside their train.jsonl.zst.")  # fmt: skip
@click.option("--vocab", "vocabs", multiple=True,
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF whose tokenizer the sessions are in; more are counted in as well.")  # fmt: skip
@click.option("--mini", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Mini model to measure with chunks of several sizes; default: the package's.")  # fmt: skip
@click.option("--p-min", "p_mins", multiple=True, metavar="P",
              type=click.FloatRange(0, 1, max_open=True),
              help="Measure what leaving out what is less likely than P would gain.")  # fmt: skip
@_QUICK
def codec(data: Path, vocabs: tuple[Path, ...], mini: Path | None, p_mins: tuple[float, ...],
          quick: bool) -> None:  # fmt: skip
    """Bits per byte of cold sessions by kind of text, beside zstd, xz, brotli and PPMd."""
    _run("codec", None, quick, data=data, vocabs=vocabs, mini=mini, p_mins=p_mins)


@bench.command()
@click.option("--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF to evaluate thawed sessions with; default: the bundled model.")  # fmt: skip
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Chat records, of which those of sources are taken that the codec does not know.")  # fmt: skip
@click.option("--text", "texts", multiple=True,
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="UTF-8 text to take sessions from, may be .zst; may be given again.")  # fmt: skip
@click.option("--meetings", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="QMSum's meetings, qmsum.jsonl.zst, to take sessions from.")  # fmt: skip
@click.option("--vocab", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF whose tokenizer the sessions are in; then nothing is evaluated.")  # fmt: skip
@_QUICK
def cold(
    model: Path | None, data: Path | None, texts: tuple[Path, ...], meetings: Path | None,
    vocab: Path | None, quick: bool,
) -> None:  # fmt: skip
    """Frozen sessions: bytes each of 100,000, finding one, and thawing it."""
    _run("cold", model, quick, data=data, texts=texts, meetings=meetings, vocab=vocab)


@bench.command()
@click.option("--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="GGUF to measure, a trained one; default: the bundled model.")  # fmt: skip
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="UTF-8 text to read, may be .zst; default: the package's sample of chat.")  # fmt: skip
@click.option("--meetings", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="QMSum's meetings, qmsum.jsonl.zst, to read as well.")  # fmt: skip
@click.option("--pairs", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Key-value examples of Lost in the Middle, .jsonl.zst, for retrieval.")  # fmt: skip
@click.option("--live", is_flag=True,
              help="Instead: time per token in the daemon, IceCache beside the full cache.")  # fmt: skip
@_QUICK
def longchat(
    model: Path | None, text: Path | None, meetings: Path | None, pairs: Path | None, live: bool,
    quick: bool,
) -> None:  # fmt: skip
    """What a bounded live cache costs, per retention policy, beside the full cache."""
    if live:
        if any(path is not None for path in (text, meetings, pairs)):
            raise click.UsageError("--live goes with --model and --quick only.")
        _run("longchat_live", model, quick)
        return
    _run("longchat", model, quick, text=text, meetings=meetings, pairs=pairs)


def _run(name: str, model: Path | None, quick: bool, **options: Any) -> Report:
    module = importlib.import_module(f"towerd.cli.bench.{name}")
    report: Report = asyncio.run(module.run(model, quick, **options))
    report.show()
    return report
