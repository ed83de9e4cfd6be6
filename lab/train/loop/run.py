"""A training run: a folder that a later command can resume.

tokenizer.json   the mini model's tokenizer (a distilled student has none)
corpus/          the text as ids; rebuilt if it is missing
last.pt          the newest checkpoint
stable.pt        the last one before the learning rate began to fall; a run with a longer budget
                 continues from it
history.jsonl    one line per report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.train.errors import TrainError
from lab.train.loop import schedule
from lab.train.loop.checkpoint import TrainingCheckpoint

History = list[dict[str, Any]]


class TrainingRun:
    """The files of one run. Raises TrainError if `folder` holds a run and `resume` is false, or
    none and it is true."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if self.last.exists() and not resume:
            raise TrainError(
                f"{folder} already holds a training run: continue it with --resume, or name "
                "another folder."
            )
        if resume and not self.last.exists():
            raise TrainError(f"{folder} holds no training run to continue.")

    @property
    def last(self) -> Path:
        return self.folder / "last.pt"

    @property
    def stable(self) -> Path:
        return self.folder / "stable.pt"

    @property
    def history(self) -> Path:
        return self.folder / "history.jsonl"

    def checkpoint(self, budget: schedule.Budget) -> TrainingCheckpoint | None:
        """The checkpoint to resume from under `budget`; None for a new run. A checkpoint whose
        learning rate had begun to fall is only valid for the budget it fell for."""
        if not self.last.exists():
            return None
        last = TrainingCheckpoint.load(self.last)
        goes_on = budget.progress(last.step, last.elapsed_s) >= last.progress - 1e-6
        if goes_on or not schedule.in_decay(last.progress) or not self.stable.exists():
            return last
        return TrainingCheckpoint.load(self.stable)

    def note(self, row: dict[str, Any]) -> None:
        """Add a line to the history."""
        with self.history.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, step_max: int | None = None) -> History:
        """The history, without the rows that resuming from an earlier checkpoint has undone."""
        if not self.history.exists():
            return []
        found: History = []
        for line in self.history.read_text().splitlines():
            row = json.loads(line)
            while found and found[-1]["step"] > row["step"]:
                found.pop()
            found.append(row)
        return [row for row in found if step_max is None or row["step"] <= step_max]
