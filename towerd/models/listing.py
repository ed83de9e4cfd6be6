"""What `towerd models` says of each model of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.errors import ModelError
from towerd.models.bundled import SHORT_NAME, bundled_model
from towerd.models.header import Header, read_header
from towerd.models.known import KNOWN
from towerd.models.local.folders import BUNDLED, FoundModel
from towerd.models.local.names import found_models

CTX_MAX = 32_768
"""The context that a daemon takes of a model that was trained for more."""
CTX_MIN = 2_048
"""Less context is of no use to a chat."""
USABLE_RAM = 0.9
"""Share of the RAM that a model and its context may take."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model and its header, or what is wrong with its file."""

    found: FoundModel
    header: Header | None
    damage: str = ""
    """One sentence; empty if the file is whole."""

    @property
    def ctx_wanted(self) -> int:
        """The context that its daemon would take, in tokens; 0 if the file is damaged."""
        if self.header is None:
            return 0
        return min(self.header.n_ctx_train or CTX_MAX, CTX_MAX)

    def ctx_that_fits(self, ram_bytes: int) -> int:
        """The largest context up to `ctx_wanted` with which the model fits into so much RAM; 0 if
        it does not fit at all."""
        free = int(ram_bytes * USABLE_RAM) - (self.header.weight_bytes if self.header else 0)
        if self.header is None or free < 0:
            return 0
        n_tokens = free // max(1, self.header.token_bytes)
        return min(n_tokens, self.ctx_wanted) if n_tokens >= CTX_MIN else 0


def listed_models() -> list[ListedModel]:
    """The bundled model and every other of this machine, with what their headers say. What is
    whole and no model (a projector, an adapter) is left out."""
    bundled = FoundModel(SHORT_NAME, bundled_model(), BUNDLED)
    short_names = {known.path: known.name for known in KNOWN.values() if known.is_at(known.path)}
    listed = []
    for found in (bundled, *found_models()):
        if found.path in short_names:
            found = FoundModel(short_names[found.path], found.path, found.source)
        try:
            header = read_header(found.path)
        except ModelError as error:
            listed.append(ListedModel(found, None, error.message))
        else:
            if header.is_model:
                listed.append(ListedModel(found, header))
    return listed
