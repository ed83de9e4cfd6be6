"""Unfinished: what a calibration has measured so far, kept in the catalog, so that one that is stopped
continues where it was."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from towerd.engine.embedded.calibration.measure import Measured
from towerd.engine.embedded.calibration.moved import MovedSample
from towerd.errors import DiskFull
from towerd.store import Store

log = logging.getLogger(__name__)

_SAVE_S = 5.0
"""At most this much is measured again after a crash."""


class _Pieces(msgspec.Struct):
    """`digest`: of all that the results depend on; others are not continued."""

    digest: str
    moves: list[list[MovedSample]] = []
    """Of each run that was measured, in order."""
    formats: Measured = msgspec.field(default_factory=Measured)


class Unfinished:
    """The pieces of one row identity's calibration. For one thread."""

    def __init__(self, store: Store, row_identity: str, depends_on: Iterable[str]) -> None:
        """row_identity: its digest in hex; depends_on: all else that the results depend on"""
        self._store = store
        self._key = f"calibrating:{row_identity}"
        digest = hashlib.blake2b("\n".join(depends_on).encode(), digest_size=16).hexdigest()
        self._pieces = self._load(digest)
        self._saved_s = time.monotonic()

    @property
    def moves(self) -> list[list[MovedSample]]:
        """The samples of moved rows, by run."""
        return self._pieces.moves

    @property
    def formats(self) -> Measured:
        """The samples of stored formats."""
        return self._pieces.formats

    def keep(self, _: object = None) -> None:
        """There is more: save it soon."""
        if time.monotonic() - self._saved_s >= _SAVE_S:
            self.save()

    def save(self) -> None:
        """Save it now."""
        with suppress(DiskFull):  # it continues all the same
            self._store.set_meta(self._key, msgspec.json.encode(self._pieces).decode())
        self._saved_s = time.monotonic()

    def forget(self) -> None:
        """It is finished, or begins anew."""
        self._pieces = _Pieces(self._pieces.digest)
        with suppress(DiskFull):
            self._store.set_meta(self._key, "")

    def _load(self, digest: str) -> _Pieces:
        text = self._store.get_meta(self._key)
        if text:
            try:
                found = msgspec.json.decode(text, type=_Pieces)
            except msgspec.DecodeError as error:
                log.warning("an unfinished calibration is begun anew", extra={"error": str(error)})
            else:
                if found.digest == digest:
                    return found
        return _Pieces(digest)
