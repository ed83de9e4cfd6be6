"""Runs that stop and resume: the same weights, bit for bit, as one that never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.train.data.corpus import Corpus, Windows
from lab.train.errors import TrainError
from lab.train.loop.checkpoint import TrainingCheckpoint
from lab.train.loop.progress import Status
from lab.train.loop.run import TrainingRun
from lab.train.loop.schedule import Budget
from lab.train.loop.trainer import TrainConfig, Trainer
from lab.train.model.network import NetworkShape
from lab.train.objectives.objective import TextObjective

SHAPE = NetworkShape(40, n_embd=16, n_layer=2, n_head=2, n_ff=24, n_ctx=16)
CONFIG = TrainConfig(Budget(steps=20), batch=4, micro_batch=2)
TEXT = Corpus({"a": (np.arange(4000) * 7 % 40).astype(np.uint32)}, {}, {"a": 1.0})
"""Each token settles the next."""


def make(
    folder: Path,
    config: TrainConfig = CONFIG,
    shape: NetworkShape = SHAPE,
    *,
    resume: bool = False,
    form: str = "f",
) -> Trainer:
    """A trainer on TEXT."""
    objective = TextObjective(Windows(TEXT, shape.n_ctx, config.seed))
    return Trainer(TrainingRun(folder, resume=resume), shape, form, objective, {}, config)


def train(trainer: Trainer, stop_at: int | None = None) -> Trainer:
    def report(status: Status) -> None:
        if status.step == stop_at:
            raise KeyboardInterrupt

    try:
        trainer.train(report)
    except KeyboardInterrupt:
        assert stop_at is not None
    return trainer


def same(one: Trainer, two: Trainer) -> bool:
    return all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)


def test_it_learns(tmp_path: Path) -> None:
    trainer = train(make(tmp_path, replace(CONFIG, budget=Budget(steps=150))))
    assert trainer.step == 150
    assert trainer.n_tokens == 150 * 4 * 16
    objective = TextObjective(Windows(TEXT, SHAPE.n_ctx, seed=2))
    with torch.no_grad():
        assert float(objective.loss(trainer.weights, SHAPE, 0, 16)) < 1.5 < np.log(40)


@pytest.mark.parametrize("stop_at", [1, 7, 13, 19])
def test_resumed_run_is_bit_equal(tmp_path: Path, stop_at: int) -> None:
    whole = train(make(tmp_path / "whole"))
    train(make(tmp_path / "parts"), stop_at)
    resumed = make(tmp_path / "parts", resume=True)
    assert resumed.step == stop_at
    train(resumed)
    assert resumed.step == 20
    assert same(whole, resumed)


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    runs = [
        train(make(tmp_path / str(n), replace(CONFIG, micro_batch=n, budget=Budget(steps=5))))
        for n in (1, 4)
    ]
    for name, weight in runs[0].weights.items():
        torch.testing.assert_close(weight, runs[1].weights[name], rtol=0, atol=2e-3)


def test_a_longer_budget_continues_from_before_the_decay(tmp_path: Path) -> None:
    """The weights of a finished run are annealed; more time starts where they were not yet."""
    train(make(tmp_path))
    longer = make(tmp_path, replace(CONFIG, budget=Budget(steps=40)), resume=True)
    assert longer.step == 12
    assert make(tmp_path, resume=True).step == 20
    train(longer)
    assert longer.step == 40


def test_history_forgets_what_was_undone(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path, resume=False)
    for step in (1, 2, 3, 2, 3, 4):
        run.note({"step": step, "tokens": step})
    assert [row["step"] for row in run.rows()] == [1, 2, 2, 3, 4]


def test_bf16(tmp_path: Path) -> None:
    """Lower precision learns the same, nearly."""
    configs = [replace(CONFIG, budget=Budget(steps=15), precision=p) for p in ("f32", "bf16")]
    runs = [train(make(tmp_path / config.precision, config)) for config in configs]
    assert not same(*runs)
    assert runs[1].smooth_loss == pytest.approx(runs[0].smooth_loss, rel=0.1)
    assert all(weight.dtype == torch.float32 for weight in runs[1].weights.values())


def test_pause_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file exists nothing is learned."""
    pause = tmp_path / "pause"
    trainer = make(tmp_path / "run", replace(CONFIG, pause_file=pause, budget=Budget(steps=3)))
    seen: list[int] = []

    def sleep(_seconds: float) -> None:
        seen.append(trainer.step)
        if len(seen) == 5:
            pause.unlink()

    monkeypatch.setattr("time.sleep", sleep)
    pause.touch()
    train(trainer)
    assert seen == [0] * 5
    assert trainer.step == 3


def test_runs_are_not_mixed_up(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="no training run"):
        make(tmp_path, resume=True)
    train(make(tmp_path), 3)
    with pytest.raises(TrainError, match="--resume"):
        make(tmp_path)
    with pytest.raises(TrainError, match="another shape"):
        make(tmp_path, shape=replace(SHAPE, n_layer=3), resume=True)
    with pytest.raises(TrainError, match="another tokenizer"):
        make(tmp_path, form="g", resume=True)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    train(make(tmp_path), 3)
    path = tmp_path / "last.pt"
    whole = path.read_bytes()
    for data in (b"", b"no checkpoint", whole[: len(whole) // 2], whole[:-100]):
        path.write_bytes(data)
        with pytest.raises(TrainError, match="not a whole checkpoint"):
            TrainingCheckpoint.load(path)


def test_checkpoints_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves the old one."""
    trainer = train(make(tmp_path), 3)
    before = (tmp_path / "last.pt").read_bytes()

    def fail(_value: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        train(trainer)
    assert (tmp_path / "last.pt").read_bytes() == before
    assert TrainingCheckpoint.load(tmp_path / "last.pt").step == 3


def test_divergence_is_an_error(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with torch.no_grad():
        trainer.weights["output_norm.weight"].fill_(float("nan"))
    with pytest.raises(TrainError, match="diverged"):
        trainer.train()


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("minutes or a number of steps", {"budget": {}}),
        ("minutes or a number of steps", {"budget": {"steps": 3, "minutes": 1.0}}),
        ("above 0", {"budget": {"minutes": 0.0}}),
        ("multiple", {"batch": 6, "micro_batch": 4}),
        ("precision", {"precision": "f8"}),
    ],
)
def test_bad_settings(text: str, given: dict[str, object]) -> None:
    budget = given.pop("budget", {"steps": 1})
    with pytest.raises(TrainError, match=text):
        TrainConfig(Budget(**budget), **given)  # type: ignore[arg-type]


def test_unknown_device(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="cannot use the device"):
        make(tmp_path, replace(CONFIG, device="toaster"))
