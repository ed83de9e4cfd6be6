"""`towerctl train`: the codec's language models, from chat records to a GGUF."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from towerd.errors import TowerdError

if TYPE_CHECKING:
    from lab.train.job import TrainingJob
    from lab.train.loop.progress import Status

Command: TypeAlias = Callable[..., Any]
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
LINE_S = 60.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
NEEDED = ("torch", "tokenizers", "matplotlib")
RETRIEVAL_DEFAULTS = {
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_ff": 256,
    "n_ctx": 4096,
    "batch": 1,
    "micro_batch": 1,
    "eval_tokens": 4096,
}
"""A file under 2 MB that llama.cpp reads at thousands of tokens a second."""

OPTIONS = (
    click.option(
        "--data",
        type=FOLDER,
        required=True,
        metavar="DIR",
        help="Folder of *.jsonl.zst chat records with src and messages.",
    ),
    click.option(
        "--out",
        type=FOLDER,
        required=True,
        metavar="DIR",
        help="Folder for checkpoints, plot, report and GGUF.",
    ),
    click.option(
        "--minutes",
        type=float,
        metavar="N",
        help="Budget by the wall clock, of all runs in --out together.",
    ),
    click.option("--steps", type=int, metavar="N", help="Budget in steps instead."),
    click.option("--resume", is_flag=True, help="Continue the run in --out."),
    click.option(
        "--manifest",
        type=FILE,
        metavar="FILE",
        help="Sources, licences and weights; default: the bundled manifest.",
    ),
    click.option(
        "--without",
        multiple=True,
        metavar="SOURCE",
        help="A source to leave out, to measure the model on its text; may be given again.",
    ),
    click.option(
        "--seed",
        type=int,
        default=1,
        show_default=True,
        help="Another seed, other weights and order.",
    ),
    click.option("--layers", "n_layer", type=int, default=6, show_default=True, help="Layers."),
    click.option(
        "--embd", "n_embd", type=int, default=192, show_default=True, help="Embedding length."
    ),
    click.option(
        "--heads", "n_head", type=int, default=3, show_default=True, help="Attention heads."
    ),
    click.option(
        "--ff", "n_ff", type=int, default=512, show_default=True, help="Feed-forward length."
    ),
    click.option(
        "--ctx",
        "n_ctx",
        type=int,
        default=512,
        show_default=True,
        help="Tokens of a training window.",
    ),
    click.option(
        "--batch",
        type=click.IntRange(min=1),
        default=8,
        show_default=True,
        help="Windows of a step.",
    ),
    click.option(
        "--micro-batch",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        help="Windows evaluated at once; less takes less memory.",
    ),
    click.option(
        "--threads", "n_threads", type=click.IntRange(min=1), help="Threads; default: all cores."
    ),
    click.option(
        "--device", default="cpu", show_default=True, help="Device of torch, such as cuda."
    ),
    click.option(
        "--precision",
        type=click.Choice(["f32", "bf16"]),
        default="f32",
        show_default=True,
        help="Arithmetic of the matrix products.",
    ),
    click.option("--pause-file", type=FILE, metavar="FILE", help="Sleep while this file exists."),
    click.option(
        "--eval-tokens",
        type=click.IntRange(min=2),
        default=32768,
        show_default=True,
        help="Tokens of each source that the last evaluation reads.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object."),
)


def course_options(command: Command) -> Command:
    """Add the options to `command` that both kinds of training have."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command()
@course_options
@click.option(
    "--vocab-size",
    "n_vocab",
    type=int,
    default=4096,
    show_default=True,
    help="Tokens of the tokenizer.",
)
@click.option(
    "--tokenizer",
    type=FILE,
    metavar="FILE",
    help="GGUF whose tokenizer to take instead of learning one.",
)
@click.option(
    "--from",
    "start",
    type=FILE,
    metavar="FILE",
    help="GGUF of an earlier run to continue from: its weights, sizes and tokenizer.",
)
@click.option(
    "--rope-base",
    "rope_freq_base",
    type=click.FloatRange(min=1, min_open=True),
    default=10000.0,
    show_default=True,
    help="RoPE's base; long contexts want a larger one.",
)
@click.option(
    "--served",
    type=FILE,
    metavar="FILE",
    help="GGUF that a daemon serves: say at the end what the model gains as its --codec-model.",
)
def mini(
    n_vocab: int,
    tokenizer: Path | None,
    start: Path | None,
    served: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Train the mini model and its tokenizer, and write OUT/mini.gguf.

    Ctrl-C saves and stops; the same command with --resume continues.
    """
    job = _job(given)
    from lab.train.job import train_mini

    with _Bar(quiet=as_json) as bar:
        report = train_mini(job, n_vocab, tokenizer, bar, start=start, served=served)
    _show(report, as_json)


@click.command()
@course_options
@click.option("--teacher", type=FILE, required=True, metavar="FILE", help="GGUF to learn from.")
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Likeliest tokens taken from the teacher at each place.",
)
@click.option(
    "--windows",
    "n_windows",
    type=click.IntRange(min=1),
    metavar="N",
    help="Learn from the first N windows of text, again and again; default: all text.",
)
@click.option(
    "--keep",
    "kept",
    type=FOLDER,
    metavar="DIR",
    help="Keep the teacher's distributions in DIR, for this and other students.",
)
@click.option(
    "--hard",
    "is_hard",
    is_flag=True,
    help="Learn the text itself: a control of what the teacher is worth.",
)
def distill(
    teacher: Path,
    top_k: int,
    n_windows: int | None,
    kept: Path | None,
    is_hard: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Train a student with the teacher's tokenizer on the teacher's own distributions, and write
    OUT/student.gguf. At the end it says what the student gains as --codec-model of a daemon that
    serves the teacher, on conversations that were held out whole.

    Ctrl-C saves and stops; the same command with --resume continues.
    """
    job = _job(given)
    from lab.train.job import Distillation
    from lab.train.job import distill as run
    from lab.train.objectives.teacher import silence_llama_cpp

    silence_llama_cpp()
    with _Bar(quiet=as_json) as bar:
        report = run(job, Distillation(teacher, top_k, n_windows, kept, is_hard), bar)
    _show(report, as_json)


@click.command(context_settings={"default_map": RETRIEVAL_DEFAULTS})
@course_options
@click.option(
    "--vocab-size",
    "n_vocab",
    type=int,
    default=512,
    show_default=True,
    help="Tokens of the tokenizer.",
)
@click.option(
    "--grow-steps",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Steps after which the rows double, from 32 tokens to --ctx.",
)
def retrieval(n_vocab: int, grow_steps: int, as_json: bool, **given: Any) -> None:
    """Train a small model to find again what it was told (pass keys, key-value pairs, copies),
    and write OUT/retrieval.gguf.

    Ctrl-C saves and stops; the same command with --resume continues.
    """
    job = _job(given)
    from lab.train.retrieval import train_retrieval

    with _Bar(quiet=as_json) as bar:
        report = train_retrieval(job, n_vocab, grow_steps, bar)
    _show(report, as_json)


def _job(given: dict[str, Any]) -> TrainingJob:
    """The options as a TrainingJob. Raises TowerdError if a package for training is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise TowerdError(
            f"Training needs {' and '.join(missing)}: install towerd with its extra, "
            "pip install -e '.[train]'."
        )
    from lab.train.job import TrainingJob
    from lab.train.loop.schedule import Budget
    from lab.train.loop.trainer import TrainConfig
    from lab.train.model.network import NetworkShape

    names = ("n_embd", "n_layer", "n_head", "n_ff", "n_ctx", "rope_freq_base")
    sizes = {name: given.pop(name) for name in names if name in given}
    budget = Budget(given.pop("steps"), given.pop("minutes"))
    names = ("seed", "batch", "micro_batch", "pause_file", "device", "precision")
    config = TrainConfig(budget, **{name: given.pop(name) for name in names})
    return TrainingJob(shape=NetworkShape(n_vocab=1, **sizes), config=config, **given)


class _Bar:
    """A progress bar on a terminal; elsewhere one line per minute. While it is open, an interrupt
    ends training after the current step, and a second interrupt ends it at once."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.progress import TextColumn

        from towerd.cli.output import terminal_bar

        self._quiet = quiet
        self._bar = terminal_bar([TextColumn("{task.fields[facts]}", markup=False)], quiet=quiet)
        self._task = self._bar.add_task("starting", total=None, facts="")
        self._next_line_s = 0.0
        self._is_stopping = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Bar:
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._stop)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _stop(self, _number: int, _frame: object) -> None:
        if self._is_stopping:
            raise KeyboardInterrupt
        self._is_stopping = True

    def _end_if_stopping(self) -> None:
        if self._is_stopping:
            raise KeyboardInterrupt

    def encoded(self, done: int, total: int) -> None:
        """Show the share of the records that are encoded."""
        self._bar.update(
            self._task, description="tokenizing", completed=done, total=total, facts=""
        )
        self._end_if_stopping()

    def learned(self, status: Status) -> None:
        """Show the share of the budget, tokens, loss and speed."""
        facts = (
            f"step {status.step}, {status.n_tokens / 1e6:.2f} M tokens, "
            f"loss {status.loss:.3f}, {status.tokens_per_s:.0f} tokens/s"
        )
        self._bar.update(
            self._task, description="training", completed=status.progress, total=1.0, facts=facts
        )
        if self._bar.disable and not self._quiet and time.monotonic() >= self._next_line_s:
            click.echo(f"{status.progress:6.1%}  {facts}", err=True)
            self._next_line_s = time.monotonic() + LINE_S
        self._end_if_stopping()


def _show(report: dict[str, Any], as_json: bool) -> None:
    from towerd.cli.output import echo_json, show_facts, show_table

    if as_json:
        echo_json(report)
        return
    bits = report["bits_per_byte"]
    roles = list(bits["roles"])
    show_table(
        ("bits per byte", ">all", *(f">{role}" for role in roles)),
        [
            (name, *(f"{row[key]:.3f}" if key in row else "" for key in ("all", *roles)))
            for name, row in (
                *bits["sources"].items(),
                ("all", {"all": bits["all"]} | bits["roles"]),
            )
        ],
    )
    for task, shares in report.get("accuracy", {}).items():
        show_table(
            (task, *(f">{length}" for length in shares)),
            [("answers found", *(f"{share:.1%}" for share in shares.values()))],
        )
    facts = [(key, report[key]) for key in ("parameters", "tokens", "steps", "minutes")]
    if "divergence_nats" in report:
        facts.append(("divergence from the teacher, nats", report["divergence_nats"]))
    show_facts([*facts, ("model", report["model"])])
    if "codec" in report:
        _show_gain(report["codec"], Path(report["model"]))


def _show_gain(found: dict[str, Any], model: Path) -> None:
    from lab.train.evaluation.gain import advice
    from towerd.cli.output import show_table

    if "refused" not in found:
        names = {"bundled": "bundled model", "student": "this one", "smaller": "smaller of both"}
        show_table(
            ("conversations not seen", ">bytes", ">bits per token"),
            [
                (title, f"{found[name]['bytes']:,}", f"{found[name]['bits_per_token']:.3f}")
                for name, title in names.items()
            ],
        )
    click.echo(advice(found, model))
