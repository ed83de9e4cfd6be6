"""The commands `towerctl lab bench NAME`; each imports its benchmark when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lab.bench.options import FOLDER, plot_option, trained_model_option
from lab.bench.work import QUICK_WORK
from towerd.cli.bench.harness.command import FILE, MODEL, QUICK, run_benchmark
from towerd.policy import NAMES as POLICIES


@click.group()
def bench() -> None:
    """Measure studies and parts on this machine; the last line printed is one JSON object."""


@bench.command()
@QUICK
def kernels(quick: bool) -> None:
    """GB/s of every kernel, beside memcpy and ggml's own routines."""
    _run("kernels.rates", None, quick)


@bench.command()
@click.option(
    "--level-formats",
    default="0=q4h,1=q6h,2=q8",
    show_default=True,
    help="The stored format of each level.",
)
@plot_option("Write the curve")
@QUICK
def footprint(quick: bool, level_formats: str, plot_path: Path | None) -> None:
    """Disk per session in a hierarchy of shared bases, against one slot file per session."""
    _run("footprint.hierarchy", None, quick, level_formats=level_formats, plot_path=plot_path)


@bench.command()
@click.option(
    "--data",
    type=FOLDER,
    help="Folder of traces: agentic_coding/, mooncake_conversation.jsonl.zst, ...; "
    "default: none are measured.",
)
@click.option(
    "--workflows",
    type=FOLDER,
    help="Folder of agent workflows, *.jsonl.zst; default: none are measured.",
)
@click.option("--policy", "policies", multiple=True, help="Measure this policy, too.")
@plot_option("Write hit rates over time and against capacity")
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes that replay side by side.",
)
@QUICK
def policy(
    data: Path | None,
    workflows: Path | None,
    policies: tuple[str, ...],
    plot_path: Path | None,
    jobs: int,
    quick: bool,
) -> None:
    """Hit rates of eviction policies on recorded traces, beside LRU and the best possible."""
    _run(
        "policy.hit_rates",
        None,
        quick,
        data=data,
        policies=policies,
        workflows=workflows,
        plot_path=plot_path,
        jobs=jobs,
    )


@bench.command()
@trained_model_option("GGUF whose states are taken")
@click.option(
    "--workflows",
    required=True,
    type=FOLDER,
    help="Folder of agent workflows, *.jsonl.zst.",
)
@click.option("--states", type=FOLDER, help="Folder that keeps the states for the next time.")
@QUICK
def states(model: Path | None, workflows: Path, states: Path | None, quick: bool) -> None:
    """Whether the model's state at the end of each prompt tells which agent acts next."""
    _run("policy.states", model, quick, workflows=workflows, states=states)


@bench.command()
@plot_option("Write cost against wrong advice")
@QUICK
def latem(quick: bool, plot_path: Path | None) -> None:
    """LATEM's cost over the optimum as predictions get worse, beside its paper's bounds."""
    _run("latem.costs", None, quick, plot_path=plot_path)


@bench.command()
@trained_model_option("GGUF to measure with")
@QUICK
def anticipation(model: Path | None, quick: bool) -> None:
    """Tokens that the next turn of a reasoning chat evaluates, with and without anticipation."""
    _run("prediction.anticipation", model, quick)


@bench.command()
@MODEL
@QUICK
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default=None,
    help="The policy to compare with LRU; default: the daemon's.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=None,
    help="Share of all distinct tokens that fits; default 0.23, with --quick 0.17.",
)
def agents(model: Path | None, quick: bool, policy: str | None, share: float | None) -> None:
    """72 agents in a daemon with room for a few: time to first token, against LRU."""
    _run("agents.latency", model, quick, policy=policy, share=share)


@bench.command()
@click.option(
    "--data",
    required=True,
    type=FILE,
    help="Chat records to measure on (dev.jsonl.zst), beside their train.jsonl.zst.",
)
@click.option(
    "--vocab",
    "vocabs",
    multiple=True,
    type=FILE,
    help="GGUF whose tokenizer the sessions are in; more are counted in as well.",
)
@click.option(
    "--mini",
    type=FILE,
    help="Mini model to measure with chunks of several sizes; default: the package's.",
)
@click.option(
    "--p-min",
    "p_mins",
    multiple=True,
    metavar="P",
    type=click.FloatRange(0, 1, max_open=True),
    help="Measure the gain of leaving out symbols less likely than P.",
)
@QUICK
def codec(
    data: Path, vocabs: tuple[Path, ...], mini: Path | None, p_mins: tuple[float, ...], quick: bool
) -> None:
    """Bits per byte of cold sessions by kind of text, beside zstd, xz, brotli and PPMd."""
    _run("codec.sizes", None, quick, data=data, vocabs=vocabs, mini=mini, p_mins=p_mins)


@bench.command()
@click.option(
    "--data",
    required=True,
    multiple=True,
    type=FILE,
    help="Chat records of the source; may be given again.",
)
@click.option(
    "--train",
    required=True,
    type=FILE,
    help="Chat records whose other sources PPMd is primed with (train.jsonl.zst).",
)
@click.option("--source", required=True, metavar="NAME", help="The source to measure.")
@click.option("--vocab", type=FILE, help="GGUF whose tokenizer the sessions are in.")
@click.option(
    "--table",
    type=FILE,
    help="Table that was built without the source; `mix` alone is measured without --mini.",
)
@click.option(
    "--mini",
    type=FILE,
    help="Mini model that was trained without the source, beside the table.",
)
@QUICK
def unseen(quick: bool, **options: Any) -> None:
    """Bits of cold sessions of a source that the codec was not trained on."""
    _run("codec.unseen", None, quick, **options)


@bench.command()
@MODEL
@click.option(
    "--learn-text", type=FILE, help="UTF-8 text to fit on; default: the calibration text."
)
@click.option("--text", type=FILE, help="UTF-8 text to measure on; default: its last third.")
@click.option("--tokens", type=click.IntRange(5_400), help="Tokens to fit on; default 24,000.")
@QUICK
def prediction(model: Path | None, quick: bool, **options: Any) -> None:
    """What rows before, layers below and the token alone tell of stored rows, and the bits that it saves."""
    _run("prediction.gains", model, quick, **options)


def _run(name: str, model: Path | None, quick: bool, **options: Any) -> None:
    run_benchmark(f"lab.bench.{name}", model, quick, QUICK_WORK.get(name), **options)
