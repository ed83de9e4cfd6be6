"""SessionMedia: pictures and sounds of a session that its request does not bring, made again from what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from towerd.store.sessions.media import MediaTable, medium_key
from towerd.tokens import Ids

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.wire import Medium, Model


@dataclass(frozen=True, slots=True)
class SessionMedia:
    """The media of one session. Thread-safe."""

    media: MediaTable
    session: int
    """Its row."""
    model: Model

    def find(self, ids: Ids) -> Medium | None:
        """The medium that these ids stand for; None: what it is made of is not kept, or the projector is another one.
        Raises WireError and StoreError. Decodes a file: takes milliseconds."""
        entry = self.media.entry(self.session, medium_key(ids))
        file = None if entry is None else self.media.read(entry)
        if entry is None or file is None:
            return None
        made = self.model.medium_at(file, entry.ordinal)
        return made if np.array_equal(made.ids, ids) else None
