"""`towerctl train` as people run it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from train_world import write_records

from lab.commands import train as module
from lab.train.loop.checkpoint import TrainingCheckpoint
from lab.train.model.pretrained import PretrainedModel
from lab.train.objectives.teacher import Teacher
from towerd.cli.main import towerctl
from towerd.codec.prior.file import PATH as prior_file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model

SMALL = (
    "--embd",
    "16",
    "--layers",
    "1",
    "--heads",
    "1",
    "--ff",
    "16",
    "--ctx",
    "32",
    "--batch",
    "2",
    "--micro-batch",
    "2",
    "--threads",
    "1",
    "--eval-tokens",
    "64",
)


def command(*args: str | Path) -> list[str]:
    program = "from towerd.cli.main import towerctl; towerctl()"
    return [sys.executable, "-P", "-c", program, "train", *map(str, args)]


def test_mini(tmp_path: Path, data_folder: Path, manifest_file: Path) -> None:
    """Ctrl-C in the middle saves; the run continues from there to a model that llama.cpp loads, a
    plot and a report."""
    out = tmp_path / "out"
    args = (
        "mini",
        "--data",
        data_folder,
        "--out",
        out,
        "--manifest",
        manifest_file,
        "--vocab-size",
        "400",
        *SMALL,
        "--json",
    )
    process = subprocess.Popen(
        command(*args, "--steps", "100000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not (out / "history.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert b"Traceback" not in errors
    step = TrainingCheckpoint.load(out / "last.pt").step
    assert step > 0
    again = subprocess.run(
        command(*args, "--steps", str(step + 3), "--resume"), capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    _check_result(out, json.loads(again.stdout), step + 3)


def test_mini_continues_from_a_file(tmp_path: Path, data_folder: Path, manifest_file: Path) -> None:
    """Weights, sizes and tokenizer are the file's, context and RoPE base are the options'; after
    one step of warm-up it is still nearly the initial model."""
    args = [
        "--data",
        str(data_folder),
        "--manifest",
        str(manifest_file),
        "--threads",
        "1",
        "--batch",
        "2",
        "--micro-batch",
        "2",
        "--eval-tokens",
        "400",
    ]
    sizes = ["--vocab-size", "400", "--embd", "16", "--layers", "1", "--heads", "1", "--ff", "16"]
    first, second = tmp_path / "first", tmp_path / "second"
    begun = run_mini([*args, *sizes, "--ctx", "32", "--out", str(first), "--steps", "60"])
    more = ["--from", str(first / "mini.gguf"), "--ctx", "64", "--rope-base", "50000"]
    less = ["--without", "notes"]
    continued = run_mini([*args, *more, *less, "--out", str(second), "--steps", "1"])
    assert continued["n_vocab"] == 400
    assert continued["sources"].keys() == begun["sources"].keys() - set(less)
    assert "notes" not in continued["bits_per_byte"]["sources"]
    assert continued["parameters"] == begun["parameters"]
    assert continued["tokens"] == 2 * 64
    now, then = (each["bits_per_byte"]["sources"]["talk"]["all"] for each in (continued, begun))
    assert now == pytest.approx(then, rel=0.02)
    shape = PretrainedModel(second / "mini.gguf").shape
    assert (shape.n_ctx, shape.rope_freq_base, shape.n_embd) == (64, 50000, 16)
    less = ["--without", "nobody", "--out", str(tmp_path / "none"), "--steps", "1"]
    result = CliRunner().invoke(towerctl, ["train", "mini", *args, *less])
    assert result.exit_code == 1
    assert "There is no source nobody" in result.output


def run_mini(args: list[str]) -> dict[str, Any]:
    result = CliRunner().invoke(towerctl, ["train", "mini", *args, "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize("kind", ["table", "text", "missing", "stories"])
def test_files_that_no_run_can_continue_from(
    tmp_path: Path, data_folder: Path, manifest_file: Path, kind: str
) -> None:
    """Another GGUF, another model, no GGUF, no file: one sentence, and no run begun."""
    files = {
        "table": prior_file,
        "text": manifest_file,
        "missing": tmp_path / "none.gguf",
        "stories": bundled_model(),
    }
    out = tmp_path / "out"
    args = [
        "--data",
        str(data_folder),
        "--out",
        str(out),
        "--manifest",
        str(manifest_file),
        "--steps",
        "1",
        "--from",
        str(files[kind]),
    ]
    result = CliRunner().invoke(towerctl, ["train", "mini", *args])
    assert result.exit_code == 1
    assert "is not a model" in result.output
    assert not out.exists()


def _check_result(out: Path, report: dict[str, Any], steps: int) -> None:
    assert json.loads((out / "report.json").read_text()) == report
    assert report["steps"] == steps
    assert report["tokens"] == steps * 2 * 32
    assert report["n_vocab"] == 400
    assert set(report["bits_per_byte"]["sources"]) == {"talk", "notes", "answers"}
    assert report["sources"]["talk"]["licence"] == "Apache-2.0"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    with GgufVocabulary(out / "mini.gguf") as vocabulary:
        assert vocabulary.n_tokens == 400
    with Teacher(out / "mini.gguf", 32) as model:
        assert model.template is not None
        assert model.name(1) == "<|im_start|>"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--steps", "1", "--data", "nowhere"), "holds no"),
        (("--data", "."), "minutes or a number of steps"),
        (("--steps", "1", "--data", ".", "--resume"), "holds no"),
        (("--steps", "1", "--data", ".", "--embd", "7"), "multiple"),
        (("--steps", "1", "--data", ".", "--manifest", "none.toml"), "manifest cannot be read"),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(towerctl, ["train", "mini", "--out", "out", *args])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert text in result.output
    assert "Traceback" not in result.output


def test_records_of_another_form(tmp_path: Path) -> None:
    write_records(tmp_path / "train.jsonl.zst", [{"text": "hello"}])
    args = ["train", "mini", "--data", str(tmp_path), "--out", str(tmp_path / "o"), "--steps", "1"]
    result = CliRunner().invoke(towerctl, args)
    assert result.exit_code == 1
    assert "line 1: not a record of src and messages" in result.output


def test_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is missing is named, with the way to install it."""
    monkeypatch.setattr(module, "NEEDED", ("torch_that_is_not_there",))
    args = ["train", "mini", "--data", str(tmp_path), "--out", str(tmp_path), "--steps", "1"]
    result = CliRunner().invoke(towerctl, args)
    assert result.exit_code == 1
    assert "pip install -e '.[train]'" in result.output


def test_unknown_teacher(tmp_path: Path, data_folder: Path, manifest_file: Path) -> None:
    args = [
        "train",
        "distill",
        "--data",
        str(data_folder),
        "--out",
        str(tmp_path / "o"),
        "--manifest",
        str(manifest_file),
        "--steps",
        "1",
        "--teacher",
        "none.gguf",
    ]
    result = CliRunner().invoke(towerctl, args)
    assert result.exit_code == 1
    assert "none.gguf" in result.output
