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
    """The digests are of all that the results depend on; others are not continued."""

    moves_digest: str = ""
    moves: list[list[MovedSample]] = []
    """Of each run that was measured, in order."""
    formats_digest: str = ""
    formats: Measured = msgspec.field(default_factory=Measured)
    short: Measured = msgspec.field(default_factory=Measured)


class Unfinished:
    """The pieces of one row identity's calibration. For one thread."""

    def __init__(
        self,
        store: Store,
        row_identity: str,
        moves_on: Iterable[str],
        formats_on: Iterable[str] | None,
    ) -> None:
        """row_identity: its digest in hex
        moves_on, formats_on: all else that the results depend on. None: formats are not measured, and
        what was measured of them is kept for later"""
        self._store = store
        self._key = f"calibrating:{row_identity}"
        self._pieces = self._load()
        self._has_formats = formats_on is not None
        moves = _digest(moves_on)
        if self._pieces.moves_digest != moves:
            self._pieces.moves_digest, self._pieces.moves = moves, []
        formats = self._pieces.formats_digest if formats_on is None else _digest(formats_on)
        if self._pieces.formats_digest != formats:
            self._pieces.formats_digest = formats
            self._pieces.formats, self._pieces.short = Measured(), Measured()
        self._saved_s = time.monotonic()

    @property
    def moves(self) -> list[list[MovedSample]]:
        """The samples of moved rows, by run."""
        return self._pieces.moves

    @property
    def formats(self) -> Measured:
        """The samples of stored formats."""
        return self._pieces.formats

    @property
    def short(self) -> Measured:
        """The samples of short chats."""
        return self._pieces.short

    def keep(self, _: object = None) -> None:
        """There is more: save it soon."""
        if time.monotonic() - self._saved_s >= _SAVE_S:
            self.save()

    def save(self) -> None:
        """Save it now."""
        has_some = self._pieces.moves or self._pieces.formats != Measured()
        text = msgspec.json.encode(self._pieces).decode() if has_some else ""
        with suppress(DiskFull):  # it continues all the same
            self._store.set_meta(self._key, text)
        self._saved_s = time.monotonic()

    def forget(self, *, moves: bool = True) -> None:
        """What is measured is finished, or begins anew. moves: moved rows are, too"""
        if moves:
            self._pieces.moves = []
        if self._has_formats:
            self._pieces.formats, self._pieces.short = Measured(), Measured()
        self.save()

    def _load(self) -> _Pieces:
        text = self._store.get_meta(self._key)
        if text:
            try:
                found = msgspec.json.decode(text, type=_Pieces)
            except msgspec.DecodeError as error:
                log.warning("an unfinished calibration is begun anew", extra={"error": str(error)})
            else:
                return found
        return _Pieces()


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
