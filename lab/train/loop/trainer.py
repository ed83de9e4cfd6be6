"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.train.data.corpus import DevText
from lab.train.errors import TrainError
from lab.train.evaluation.bits_per_byte import Evaluation, evaluate
from lab.train.loop.checkpoint import TrainingCheckpoint
from lab.train.loop.optimizer import Optimizer
from lab.train.loop.progress import Status
from lab.train.loop.run import TrainingRun
from lab.train.loop.schedule import Budget, Clock, in_decay, scale
from lab.train.model.network import NetworkShape, Weights, init_weights, placed
from lab.train.objectives.objective import Objective

N_CHECKPOINTS = 20
"""Number of checkpoints and evaluations in a budget."""
DEV_SAMPLE_TOKENS = 4096
EVALUATION_SHARE_MAX = 0.1
"""Share of the time so far that evaluation may take: a short run is evaluated less often."""
PRECISIONS = ("f32", "bf16")
LOSS_MEMORY = 0.98
PAUSE_POLL_S = 1.0
LOSS_LIMIT = 20.0
"""Nats per token that no working network ever costs."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Sizes are in windows of `n_ctx` tokens."""

    budget: Budget
    seed: int = 1
    batch: int = 8
    """Windows per step."""
    micro_batch: int = 2
    """Windows evaluated at once; fewer take less memory, with the same result up to rounding."""
    pause_file: Path | None = None
    """While this file exists, training sleeps."""
    device: str = "cpu"
    """A torch device."""
    precision: str = "f32"
    """f32, or bf16 for the matrix products (on devices where it is faster)."""

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.batch % self.micro_batch:
            raise TrainError(
                f"The batch ({self.batch}) must be a multiple of the micro batch "
                f"({self.micro_batch})."
            )
        if self.precision not in PRECISIONS:
            raise TrainError(f"The precision is {' or '.join(PRECISIONS)}, not {self.precision!r}.")


Report = Callable[[Status], None]
InitWeights = Callable[[NetworkShape, int], Weights]
"""Makes the initial weights of a new run from a shape and a seed."""


class Trainer:
    """The training loop. `train` returns when the budget is used up. If its `report` raises, it
    saves a checkpoint and lets the exception pass."""

    def __init__(
        self,
        run: TrainingRun,
        shape: NetworkShape,
        form: str,
        objective: Objective,
        dev: Mapping[str, DevText],
        config: TrainConfig,
        fresh: InitWeights = init_weights,
    ) -> None:
        self._run, self._form, self._objective, self._dev = run, form, objective, dev
        self._config = config
        self.step, self._window, before_s, progress = 0, 0, 0.0, 0.0
        found = run.checkpoint(config.budget)
        if found is None:
            self.shape, weights = shape, fresh(shape, config.seed)
        else:
            _check_same(found, shape, form)
            self.shape, weights = found.shape, found.weights
            self.step, self._window, before_s = found.step, found.window, found.elapsed_s
            progress = config.budget.progress(self.step, before_s)
        self._device = _device(config.device)
        self.weights = placed(weights, self._device)
        self._optimizer = Optimizer(self.weights)
        if found is not None:
            self._optimizer.load_state_dict(found.optimizer)
        self._n_checkpoints = int(progress * N_CHECKPOINTS)
        self._clock = Clock(before_s)
        self._loss = 0.0
        self._n_losses = 0
        self._evaluation_s = 0.0

    @property
    def n_tokens(self) -> int:
        """Tokens learned from so far."""
        return self._window * self.shape.n_ctx

    @property
    def elapsed_s(self) -> float:
        """Seconds of training by the wall clock, pauses and earlier runs included."""
        return self._clock.elapsed_s()

    def train(self, report: Report | None = None) -> None:
        """Train until the budget is used up. Raises TrainError if the loss diverges."""
        while (progress := self._progress()) < 1:
            self._checkpoint_if_due(progress)
            n_before, started = self.n_tokens, time.monotonic()
            self._learn(progress)
            tokens_per_s = (self.n_tokens - n_before) / (time.monotonic() - started)
            status = Status(self.step, self.n_tokens, self.smooth_loss, progress, tokens_per_s)
            if report is not None:
                self._report_step(report, status)
        self._save(self._run.last, self._progress())

    def evaluate(self, n_tokens_max: int) -> Evaluation:
        """The cost of the evaluation text with the current weights."""
        return evaluate(self.weights, self.shape, self._dev, n_tokens_max=n_tokens_max)

    @property
    def smooth_loss(self) -> float:
        """Nats per token over about the last fifty steps."""
        return self._loss / (1 - LOSS_MEMORY**self._n_losses) if self._n_losses else 0.0

    def _report_step(self, report: Report, status: Status) -> None:
        """Report a step. Weights are consistent between two steps, so training stops here."""
        try:
            report(status)
        except BaseException:
            self._save(self._run.last, self._progress())
            raise

    def _learn(self, progress: float) -> None:
        """Do one step."""
        config = self._config
        n_micro = config.batch // config.micro_batch
        total = 0.0
        for i in range(n_micro):
            self._wait_while_paused()
            first = self._window + i * config.micro_batch
            with torch.autocast(
                self._device.type, torch.bfloat16, enabled=config.precision == "bf16"
            ):
                loss = self._objective.loss(self.weights, self.shape, first, config.micro_batch)
            torch.autograd.backward(loss / n_micro)
            total += loss.item() / n_micro
        if not total < LOSS_LIMIT:
            raise TrainError(f"Training diverged at step {self.step}: the loss is {total}.")
        self._optimizer.step(scale(self.step, progress))
        self.step += 1
        self._window += config.batch
        self._loss = LOSS_MEMORY * self._loss + (1 - LOSS_MEMORY) * total
        self._n_losses += 1

    def _progress(self) -> float:
        return self._config.budget.progress(self.step, self.elapsed_s)

    def _checkpoint_if_due(self, progress: float) -> None:
        """At every twentieth of the budget, save a checkpoint and sample the evaluation text."""
        n_due = int(progress * N_CHECKPOINTS)
        if n_due <= self._n_checkpoints:
            return
        self._n_checkpoints = n_due
        if not in_decay(progress):
            self._save(self._run.stable, progress)
        self._save(self._run.last, progress)
        if self._evaluation_s > EVALUATION_SHARE_MAX * self.elapsed_s:
            return
        began = time.monotonic()
        self.note({"dev": round(self.evaluate(DEV_SAMPLE_TOKENS).total().per_byte, 4)})
        self._evaluation_s += time.monotonic() - began

    def note(self, more: dict[str, Any]) -> None:
        """Add a line about the current state to the history."""
        facts = {"step": self.step, "tokens": self.n_tokens, "loss": round(self.smooth_loss, 4)}
        facts |= {"elapsed_s": round(self.elapsed_s, 1), "unix_s": round(time.time())}
        self._run.note(facts | more)

    def _save(self, path: Path, progress: float) -> None:
        checkpoint = TrainingCheckpoint(
            shape=self.shape,
            weights=self.weights,
            optimizer=self._optimizer.state_dict(),
            step=self.step,
            window=self._window,
            elapsed_s=self.elapsed_s,
            progress=progress,
            form=self._form,
        )
        checkpoint.save(path)

    def _wait_while_paused(self) -> None:
        while self._config.pause_file is not None and self._config.pause_file.exists():
            time.sleep(PAUSE_POLL_S)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrainError(f"torch cannot use the device {name!r}: {reason}") from error
    return device


def _check_same(found: TrainingCheckpoint, shape: NetworkShape, form: str) -> None:
    if found.form != form:
        raise TrainError(
            "This run was trained with another tokenizer, form or choice of sources: start a new one."
        )
    if found.shape != shape:
        raise TrainError(
            f"This run has another shape ({found.shape}): start a new one, or ask for it."
        )
