"""Copies of the tables and models that blobs were written with, in a folder beside the blobs, so
that a release with other tables or models can still read them.

    mix-NAME.gguf    a table, by the name that `mix` blobs give it
    mini-NAME.gguf   a mini model, by the name that `network` blobs give it and its table
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from towerd.codec.base import TokenVocabulary
from towerd.codec.container import Blob
from towerd.codec.errors import UnknownModel
from towerd.codec.forms import FormCoder
from towerd.codec.mix import Mix
from towerd.codec.models import mini
from towerd.codec.network import Network
from towerd.codec.prior import file
from towerd.codec.prior.file import Prior


def keep(folder: Path, coder: FormCoder) -> None:
    """Copy the files that a form of the package needs into `folder`, unless they are there. Each
    copy is durable, and whole or absent. For one thread of one process at a time. Raises
    OSError."""
    if isinstance(coder, Mix | Network):
        _copy(file.PATH, _table_path(folder, coder.prior.name))
    if isinstance(coder, Network):
        _copy(mini.PATH, _mini_path(folder, coder.model))


def find(folder: Path, vocabulary: TokenVocabulary, blob: Blob) -> FormCoder | None:
    """The form that reads a blob, with the files kept for it; None if none were kept. UnknownModel
    if they are damaged."""
    if blob.form.name == Mix.name:
        prior = _table(_table_path(folder, blob.model))
        return None if prior is None else Mix(vocabulary, prior)
    path = _mini_path(folder, blob.model)
    if blob.form.name != Network.name or not path.exists():
        return None
    for prior in _tables(folder):
        try:
            network = mini.mini_network(vocabulary, path, prior)
        except UnknownModel:
            continue  # the mini model belongs to another table
        if network.model == blob.model:
            return network
    raise UnknownModel(f"The model {path} or its table is damaged: put a copy of it there.")


def _tables(folder: Path) -> Iterator[Prior]:
    yield file.bundled()
    for path in sorted(folder.glob("mix-*.gguf")):
        prior = _table(path)
        if prior is not None and prior.name != file.bundled().name:
            yield prior


def _table(path: Path) -> Prior | None:
    if not path.exists():
        return None
    prior = file.load(path)
    if _table_path(path.parent, prior.name) != path:
        raise UnknownModel(f"The table {path} is damaged: put a copy of it there.")
    return prior


def _table_path(folder: Path, name: bytes) -> Path:
    return folder / f"mix-{name.hex()}.gguf"


def _mini_path(folder: Path, name: bytes) -> Path:
    return folder / f"mini-{name.hex()}.gguf"


def _copy(source: Path, path: Path) -> None:
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    half = path.with_suffix(".half")
    half.unlink(missing_ok=True)  # left by a process that was killed
    try:
        with source.open("rb") as data, open(half, "wb", opener=_private) as copy:
            shutil.copyfileobj(data, copy)
            copy.flush()
            os.fsync(copy.fileno())
        half.replace(path)
        _sync(path.parent)
    finally:
        half.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_EXCL, 0o600)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
