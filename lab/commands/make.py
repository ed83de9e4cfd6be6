"""`towerctl model`: make GGUF files for tests, benchmarks and the bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUT = click.Path(dir_okay=False, path_type=Path)
ARCHS = (
    "llama qwen3 phi3 stablelm gptneox smollm3 qwen2vl qwen3vl deepseek2 gemma3 gpt-oss cohere2 "
    "mamba rwkv7 lfm2 granitehybrid jamba falcon-h1 qwen35 glm4moe"
).split()
SCALINGS = ["none", "linear", "yarn", "llama3", "longrope"]


@click.command()
@click.argument("out", type=OUT)
@click.option(
    "--preset",
    type=click.Choice(["tiny", "small", "1b"]),
    default="tiny",
    show_default=True,
    help="Shape to start from.",
)
@click.option("--layers", "n_layer", type=int, help="Layers.")
@click.option("--embd", "n_embd", type=int, help="Embedding length.")
@click.option("--heads", "n_head", type=int, help="Attention heads.")
@click.option("--heads-kv", "n_head_kv", type=int, help="KV heads.")
@click.option("--head-dim", "head_dim", type=int, help="Values per head.")
@click.option("--ff", "n_ff", type=int, help="Feed-forward length.")
@click.option("--vocab-size", "n_vocab", type=int, help="Tokens of a synthetic vocabulary.")
@click.option("--ctx", "n_ctx_train", type=int, help="Context length to declare.")
@click.option("--rope-freq-base", type=float, help="RoPE base frequency.")
@click.option("--arch", type=click.Choice(ARCHS), help="Architecture.")
@click.option("--mtp", "n_mtp", type=int, help="Heads that predict a further token (0 or 1).")
@click.option("--rope-scaling", type=click.Choice(SCALINGS), help="How its context was extended.")
@click.option("--ftype", type=click.Choice(["F32", "F16", "Q8_0"]), help="Type of the matrices.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed, other weights.")
@click.option("--vocab", type=FILE, help="GGUF whose tokenizer to copy; vocab-only ones will do.")
@click.option("--chat-template-file", type=FILE, help="Jinja chat template to write into it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, no progress bar.")
def random(
    out: Path,
    preset: str,
    seed: int,
    vocab: Path | None,
    chat_template_file: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Write OUT, a model with random weights. The same options give the same bytes."""
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from lab.models.random_gguf import PRESETS, make_random_gguf

    shape = replace(PRESETS[preset], **{key: v for key, v in given.items() if v is not None})
    template = chat_template_file.read_text() if chat_template_file else None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True, quiet=as_json)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(out.name)
        make_random_gguf(
            out,
            shape,
            seed=seed,
            vocab=vocab,
            chat_template=template,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _report(out, as_json)


@click.command()
@click.argument("checkpoint", type=FILE)
@click.argument("tokenizer", type=FILE)
@click.argument("out", type=OUT)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stories(checkpoint: Path, tokenizer: Path, out: Path, as_json: bool) -> None:
    """Convert a llama2.c CHECKPOINT and its TOKENIZER file to the GGUF OUT."""
    from lab.models.stories import convert

    convert(checkpoint, tokenizer, out)
    _report(out, as_json)


def _report(out: Path, as_json: bool) -> None:
    import json

    size = out.stat().st_size
    if as_json:
        click.echo(json.dumps({"path": str(out), "bytes": size}))
    else:
        click.echo(f"{out}: {size / 2**20:.1f} MiB")
