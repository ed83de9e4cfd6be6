"""TransformBases: the bases that transform-coded rows were written with, a file each.

    bases/NAME.basis    a basis (`towerd.codec.rows.basis`), NAME as in `coded_format`

A file is immutable and durable before any segment names it. What a damaged or lost one coded is lost with
it: those rows are evaluated again, the tokens stay.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

from towerd.codec.errors import CodecError, NewerVersion
from towerd.codec.rows.basis import BYTES_MAX, Basis, read_basis
from towerd.slots.errors import StateError
from towerd.store.files import durable
from towerd.store.files.directory import remove_file
from towerd.store.files.file_map import StoreFiles
from towerd.store.segments.coded_format import basis_name

log = logging.getLogger(__name__)

SUFFIX = ".basis"
_OPEN_MAX = 4
"""Bases that are kept in memory."""
_YOUNG_S = 3600.0
"""What was written since may not be named by a segment yet."""


class BasisLost(StateError):
    """A basis is missing or damaged, so that no rows can be read with it."""


class TransformBases:
    """The bases in a folder. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        tmp: Path,
        files: StoreFiles,
        being_written: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """folder: made when the first basis is written; tmp: for halves of files. being_written: see `Catalog`"""
        self._folder = folder
        self._tmp = tmp
        self._files = files
        self._being_written = being_written
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Basis] = OrderedDict()
        self._lost: set[str] = set()

    def add(self, basis: Basis) -> str:
        """Keep a basis durably; returns its name. Raises DiskFull or StoreError."""
        name = basis_name(basis.digest)
        path = self.path(name)
        with durable.store_errors("a transform basis cannot be written"):
            durable.make_dir(self._folder)
            if self.problem(name) is not None:
                half = self._tmp / f"{name}-{os.getpid()}{SUFFIX}"
                with self._being_written(half.name):  # gc must not delete it
                    half.unlink(missing_ok=True)
                    with self._files.create(half, path, len(basis.data)) as file:
                        file.write(memoryview(basis.data), 0)
            else:
                self.touch(name)  # it counts as just written for gc
        with self._lock:
            self._lost.discard(name)
            self._keep(name, basis)
        return name

    def get(self, name: str, row_identity: bytes) -> Basis:
        """The basis of this name, for the rows of this row identity (a digest). BasisLost if it is missing or
        damaged, which the log says once; NewerVersion; OSError if it cannot be read now."""
        with self._lock:
            known = self._open.get(name)
            if known is not None:
                self._open.move_to_end(name)
        try:
            basis = known or self._read(name)
            if basis.row_identity != row_identity:
                raise BasisLost(f"the transform basis {name} is for the rows of another model")
        except BasisLost as error:
            with self._lock:
                is_new = name not in self._lost
                self._lost.add(name)
            if is_new:
                log.warning(
                    "a transform basis is lost; what was coded with it is evaluated again",
                    extra={"error": str(error)},
                )
            raise
        with self._lock:
            self._keep(name, basis)
        return basis

    def touch(self, name: str) -> None:
        """Let a basis count as just written. Raises OSError."""
        os.utime(self.path(name))

    def names(self) -> set[str]:
        """Those in the folder."""
        try:
            found = list(self._folder.iterdir())
        except FileNotFoundError:
            return set()
        return {path.stem for path in found if path.suffix == SUFFIX}

    def problem(self, name: str) -> str | None:
        """What is wrong with a basis's file; None if it is whole. Raises OSError."""
        try:
            self._read(name)
        except (BasisLost, NewerVersion) as error:
            return str(error)
        return None

    def unneeded(self, needed: Collection[str]) -> list[Path]:
        """The files of bases that are not among `needed`, but for those that were just written."""
        found = []
        for name in self.names() - set(needed):
            try:
                is_old = time.time() - self.path(name).stat().st_mtime > _YOUNG_S
            except OSError:
                continue
            if is_old:
                found.append(self.path(name))
        return found

    def remove(self, path: Path) -> int:
        """Delete a basis; returns the bytes freed."""
        with self._lock:
            self._open.pop(path.stem, None)
        return remove_file(path)

    def path(self, name: str) -> Path:
        """Where the file of a basis is."""
        return self._folder / (name + SUFFIX)

    def nbytes(self) -> int:
        """Bytes of all files."""
        found = 0
        for name in self.names():
            try:
                found += self.path(name).stat().st_size
            except OSError:
                continue
        return found

    def _keep(self, name: str, basis: Basis) -> None:
        self._open[name] = basis
        while len(self._open) > _OPEN_MAX:
            self._open.popitem(last=False)

    def _read(self, name: str) -> Basis:
        try:
            data = bytes(self._files.read(self.path(name), BYTES_MAX))
        except FileNotFoundError:
            raise BasisLost(f"the transform basis {name} is missing") from None
        except StateError as error:
            raise BasisLost(f"the transform basis {name} is damaged: {error}") from error
        try:
            basis = read_basis(data)
        except NewerVersion:
            raise
        except CodecError as error:
            raise BasisLost(f"the transform basis {name} is damaged: {error}") from error
        if basis_name(basis.digest) != name or basis.rope is None:
            raise BasisLost(f"the file of the transform basis {name} holds another one")
        return basis
