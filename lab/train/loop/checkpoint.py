"""The state of training, in one file that is written atomically."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lab.train.errors import TrainError
from lab.train.model.network import NetworkShape, Weights

VERSION = 1


@dataclass(frozen=True)
class TrainingCheckpoint:
    """Weights, optimizer state and how far training has come."""

    shape: NetworkShape
    weights: Weights
    optimizer: dict[str, Any]
    step: int
    window: int
    """The next window to learn from; it only grows, whatever the batch size."""
    elapsed_s: float
    progress: float
    """Share of the budget that was used."""
    form: str
    """Fingerprint of the form; these weights are meaningless for the ids of another form."""

    def save(self, path: Path) -> None:
        """Write it atomically: `path` always holds either the old or the new checkpoint."""
        part = path.with_name(f".{path.name}.part")
        value = {
            f: getattr(self, f)
            for f in ("optimizer", "step", "window", "elapsed_s", "progress", "form")
        }
        value["shape"] = asdict(self.shape)
        value["weights"] = {name: weight.detach().cpu() for name, weight in self.weights.items()}
        with part.open("wb") as file:
            torch.save({"version": VERSION} | value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> TrainingCheckpoint:
        """Read what `save` wrote. Raises TrainError."""
        try:
            value = torch.load(path, map_location="cpu", weights_only=True)
            version = value.pop("version")
            if version != VERSION:
                raise TrainError(f"{path} is a checkpoint of version {version}, not {VERSION}.")
            shape = NetworkShape(**value.pop("shape"))
            weights = {n: w.requires_grad_() for n, w in value.pop("weights").items()}
            found = cls(shape=shape, weights=weights, **value)
        except (
            OSError,
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            raise TrainError(
                f"{path} is not a whole checkpoint of this program: {error}."
            ) from error
        sizes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if sizes != shape.tensors():
            raise TrainError(f"{path} holds other weights than its shape asks for.")
        return found
