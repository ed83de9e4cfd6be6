"""What a long command shows where there is no terminal for a bar: a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_S = 10.0
"""Seconds between two lines."""


@dataclass(slots=True)
class _Task:
    description: str
    total: float | None
    began_s: float
    completed: float = 0.0


class Lines:
    """Tasks as lines of text, from a thread of its own: a step may take longer than LINE_S. It stands for
    `rich.progress.Progress`, as far as that is used."""

    def __init__(self, say: Callable[[str], object], every_s: float = LINE_S) -> None:
        self._say, self._every_s = say, every_s
        self._tasks: dict[TaskID, _Task] = {}
        self._n = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def add_task(self, description: str, *, total: float | None, **fields: Any) -> TaskID:
        """Show one more; total: how much it is; None: that is not known. Returns its name for the
        other methods."""
        with self._lock:
            self._n += 1
            name = cast("TaskID", self._n)
            self._tasks[name] = _Task(description, total, time.monotonic())
            return name

    def update(
        self,
        task: TaskID,
        /,
        *,
        total: float | None = None,
        completed: float | None = None,
        advance: float | None = None,
        description: str | None = None,
        **fields: Any,
    ) -> None:
        """Change what is given of a task."""
        with self._lock:
            found = self._tasks[task]
            found.total = found.total if total is None else total
            found.completed = found.completed if completed is None else completed
            found.completed += advance or 0
            found.description = description or found.description

    def advance(self, task: TaskID, /, advance: float = 1) -> None:
        """So much more of it is done."""
        self.update(task, advance=advance)

    def remove_task(self, task: TaskID, /) -> None:
        """Show it no more."""
        with self._lock:
            del self._tasks[task]

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                tasks = list(self._tasks.values())
                lines = [_line(task) for task in tasks if task.completed != task.total]
            for line in lines:
                self._say(line)


def _line(task: _Task) -> str:
    """Such as `calibrating: 35 %, 2 min so far, about 4 min to go`."""
    passed_s = time.monotonic() - task.began_s
    said = f"{duration(passed_s)} so far"
    if not task.total:
        return f"{task.description}: {said}"
    share = task.completed / task.total
    left = f", about {duration(passed_s * (1 - share) / share)} to go" if share > 0 else ""
    return f"{task.description}: {share:.0%}, {said}{left}"


def duration(seconds: float) -> str:
    """A time in its largest unit, such as "5 min"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
