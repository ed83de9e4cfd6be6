"""Benchmarks of the daemon that `towerctl bench NAME` finds here; each is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.bench.options import plot_option, trained_model_option
from lab.bench.work import QUICK_WORK
from towerd.cli.bench.harness.command import FILE, MODEL, QUICK, run_benchmark

if TYPE_CHECKING:
    from towerd.cli.bench.harness.report import Report


@click.command()
@MODEL
@QUICK
def memory(model: Path | None, quick: bool) -> None:
    """Resident memory, idle and with the forty chats of `switch`, beside llama-server's."""
    _run("memory", model, quick)


@click.command()
@MODEL
@QUICK
def concurrency(model: Path | None, quick: bool) -> None:
    """Tokens per second at 1, 2, 4 and 8 streams, against llama-server with the same flags."""
    _run("concurrency", model, quick)


@click.command()
@MODEL
@QUICK
def tools(model: Path | None, quick: bool) -> None:
    """Three agents with thirty tools each, in turn, against llama-server's defaults."""
    _run("tools", model, quick)


@click.command()
@QUICK
def models(quick: bool) -> None:
    """Two models in turn, with room for one, against llama-server's router."""
    _run("models", None, quick)


@click.command()
@MODEL
@QUICK
def proxy(model: Path | None, quick: bool) -> None:
    """The latency that towerd adds in front of a llama-server, at 1 and 32 streams."""
    _run("proxy", model, quick)


@click.command()
@trained_model_option("GGUF to serve")
@click.option(
    "--ram-max", metavar="SIZE", help="Limit the daemon's RAM, and judge the most it took."
)
@QUICK
def soak(model: Path | None, quick: bool, ram_max: str | None) -> None:
    """10,000 short requests under budgets that are far too small: the daemon's resource use."""
    report = _run("soak", model, quick, ram_max=ram_max)
    if report.figures["failed"] or "stopped" in report.figures:
        raise click.exceptions.Exit(1)


@click.command()
@MODEL
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Measure this policy besides the default and LRU; default: all; with --quick none.",
)
@click.option(
    "--share",
    "shares",
    multiple=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of all distinct tokens that RAM and disk each hold; default 0.1, 0.3 and 0.5.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    multiple=True,
    type=click.IntRange(1, 64),
    help="Workflows at a time; default 4 and 16.",
)
@click.option("--seeds", type=click.IntRange(1, 100), help="Default 5; with --quick 2.")
@click.option("--threads", type=click.IntRange(1, 256), help="Threads of the daemons.")
@QUICK
def workflows(model: Path | None, quick: bool, **options: Any) -> None:
    """Agents that work together in a cache that is too small: policies, with and without hints."""
    _run("workflows.latency", model, quick, **options)


@click.command()
@click.option(
    "--python",
    default=sys.executable,
    show_default="this one",
    help="The Python interpreter of an environment with vLLM and towerd.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1024, 16384),
    default=3000,
    show_default=True,
    help="Length of the stored prompt.",
)
@QUICK
def vllm(python: str, tokens: int, quick: bool) -> None:
    """Time to the first token of a stored prompt in vLLM, against evaluating it, its ExampleConnector and LMCache."""
    _run("vllm.first_tokens", None, quick, python=python, tokens=tokens)


@click.command()
@QUICK
def store(quick: bool) -> None:
    """Load time, look-up time and size of a store of 100,000 segments."""
    _run("store", None, quick)


@click.command()
@MODEL
@QUICK
def shared(model: Path | None, quick: bool) -> None:
    """A chat of another machine through an S3 server, against its prefill and a plain copy of the bytes."""
    _run("shared.resume", model, quick)


@click.command()
@trained_model_option("GGUF to chat with")
@click.option("--chats", type=click.IntRange(4, 1000), help="How many; default 500, quick 32.")
@click.option(
    "--level-formats",
    default=None,
    help="The stored format of each level, without a transform; default: what was measured.",
)
@QUICK
def footprint(
    model: Path | None, chats: int | None, level_formats: str | None, quick: bool
) -> None:
    """What chats over four prompts take after each layer of the store, and a request's wait meanwhile."""
    _run("footprint.chats", model, quick, chats=chats, level_formats=level_formats)


@click.command()
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


@click.command()
@trained_model_option("Trained GGUF to measure")
@click.option(
    "--learn",
    "learn_text",
    type=FILE,
    help="UTF-8 text to learn from; default: two thirds of the one that calibration uses.",
)
@click.option(
    "--text", type=FILE, help="UTF-8 text to measure on; default: the last third of that one."
)
@click.option(
    "--layers",
    type=click.IntRange(1, 64),
    help="Layers that are transformed together; default: as a daemon chooses, 5 if there are tokens enough.",
)
@QUICK
def transform(
    model: Path | None, learn_text: Path | None, text: Path | None, layers: int | None, quick: bool
) -> None:
    """Bits and drift of transform-coded rows beside the block formats, and the time to bring them back."""
    _run("transform.rates", model, quick, learn_text=learn_text, text=text, layers=layers)


@click.command()
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
    _run("cold.chats", model, quick, data=data, texts=texts, meetings=meetings, vocab=vocab)


@click.command()
@click.option(
    "--model",
    "-m",
    type=FILE,
    help="GGUF to measure, a trained one; default: SmolLM2, or where it was not fetched the package's "
    "model for retrieval.",
)
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
    help="Key-value examples of Lost in the Middle, .jsonl.zst, to tell instead of random pairs.",
)
@click.option(
    "--live",
    is_flag=True,
    help="The time a token alone, IceCache beside the full cache; without --quick it is measured at the end.",
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
    """What a bounded live cache costs and keeps, by policy and scope, beside the full cache."""
    if live:
        if any(path is not None for path in (text, meetings, pairs)):
            raise click.UsageError("--live goes with --model and --quick only.")
        _run("longchat.live", model, quick)
        return
    _run("longchat.policies", model, quick, text=text, meetings=meetings, pairs=pairs)


@click.command()
@trained_model_option("Trained GGUF to serve")
@QUICK
def volatile(model: Path | None, quick: bool) -> None:
    """Agents' prompts that change in the middle: what is evaluated, how soon, how exact it is."""
    _run("volatile.served", model, quick)


def _run(name: str, model: Path | None, quick: bool, **options: Any) -> Report:
    return run_benchmark(f"lab.bench.{name}", model, quick, QUICK_WORK.get(name), **options)
