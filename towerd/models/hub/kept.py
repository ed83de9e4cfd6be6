"""HubModel: a model of the Hub that is on this machine, and finding one without asking the Hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from towerd.errors import ModelError
from towerd.models.hub.cache import hub_cache, snapshots_of
from towerd.models.hub.choice import Choice, RepoName


@dataclass(frozen=True, slots=True)
class HubModel:
    """The files of a model."""

    name: str
    """OWNER/REPO:QUANT, or without a quantization if the file's name has none."""
    path: Path
    projector: Path | None

    @classmethod
    def of(cls, wanted: RepoName, choice: Choice, folder: Path) -> HubModel:
        """The files of `choice`, in the `folder` of a snapshot."""
        quant = choice.model.quant
        name = f"{wanted.repo}:{quant}" if quant else wanted.repo
        projector = folder / choice.projector if choice.projector else None
        return cls(name, folder / choice.model.path, projector)


def kept(wanted: RepoName, take: Callable[[tuple[str, ...]], Choice]) -> HubModel | None:
    """The model as it is in the cache; None if no snapshot has all that `take` chooses."""
    for snapshot in snapshots_of(hub_cache(), wanted.repo):
        try:
            return HubModel.of(wanted, take(snapshot.files), snapshot.folder)
        except ModelError:
            continue
    return None
