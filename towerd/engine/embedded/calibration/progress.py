"""CalibrationProgress: how much of a calibration is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CalibrationProgress:
    """Progress in tokens. The total is the most that is to be evaluated, unless the search has to try more
    than it is expected to; those that turn out not to be needed count as done."""

    done: int = 0
    total: int = 0

    def expecting(self, n_tokens: int) -> CalibrationProgress:
        """The progress if so much is to be evaluated from here on."""
        total = max(self.total, self.done + n_tokens)
        return CalibrationProgress(total - n_tokens, total)

    def advanced(self, n_tokens: int) -> CalibrationProgress:
        """The progress after so many more tokens. It is not done before it ends, whatever was expected."""
        done = self.done + n_tokens
        return CalibrationProgress(done, max(done + 1, self.total))

    def to_json(self) -> dict[str, int]:
        """As the API has it."""
        return {"done": self.done, "total": self.total}
