"""KeptMedia: pictures and sounds of a session that its request does not bring, made again from what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from towerd.store.sessions.media import MediaTable, medium_key
from towerd.tokens import Ids

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.wire import Medium, Model

_TIMES = (1, 4)
"""How often a prompt has the same file: the ids of each time are others."""


@dataclass(frozen=True, slots=True)
class KeptMedia:
    """The media of one session. Thread-safe."""

    media: MediaTable
    session: int
    """Its row."""
    model: Model

    def find(self, ids: Ids) -> Medium | None:
        """The medium that these ids stand for; None: what it is made of is not kept, or the projector is another one.
        Raises WireError and StoreError. Decodes files: takes milliseconds for each."""
        for file in self.media.files(self.session, medium_key(ids)):
            for n_times in _TIMES:
                for made in self.model.media_of(file, n_times):
                    if np.array_equal(made.ids, ids):
                        return made
        return None
