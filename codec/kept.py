"""Copies of the tables and models that blobs were written with, in a folder beside the blobs, so
that a release with other tables or models can still read them.

    mix-NAME.gguf    a table, by the name that `mix` blobs give it
    mini-NAME.gguf   a model, by the name that `network` blobs give it and its table
    student-NAME.gguf  the same, of a model that was the user's
    start-NAME.zst   what the mixer starts from beside this model, if no table has its tokens
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from towerd.codec.base import TokenVocabulary
from towerd.codec.container import Blob
from towerd.codec.errors import UnknownModel
from towerd.codec.forms import mini
from towerd.codec.forms.form import FormCoder
from towerd.codec.forms.mini import FindStart, Student
from towerd.codec.forms.mix import MiniCoder, Mix
from towerd.codec.forms.network import Network, network_hash
from towerd.codec.forms.start import MixStart, unpack
from towerd.codec.prior import file
from towerd.codec.prior.file import Prior, name_of
from towerd.system.folders import folder_locked


def keep(folder: Path, coder: FormCoder) -> None:
    """Copy the files that a form needs into `folder`, unless they are there. Each copy is durable,
    and whole or absent. Raises OSError, also for a file that was replaced since it was read."""
    if isinstance(coder, Student) and coder.start is not None:
        _write(_start_path(folder, coder.model), coder.start.pack())
    elif isinstance(coder, MiniCoder):
        _copy(file.PATH, _table_path(folder, coder.prior.name), coder.prior.name)
    if isinstance(coder, Network):
        is_student = isinstance(coder, Student)
        kept = _student_path if is_student else _mini_path
        source = coder.path if isinstance(coder, Student) else mini.PATH
        if not is_students(folder, coder.model):
            _copy(source, kept(folder, coder.model), coder.predictor)


def is_students(folder: Path, name: bytes) -> bool:
    """Whether the model of this name is kept and was the user's, not a release's."""
    kept = _student_path(folder, name), _start_path(folder, name)
    return any(path.exists() for path in kept) and _model_path(folder, name).exists()


def starts(folder: Path) -> FindStart:
    """Finds what was kept for a model; see `FindStart`."""
    return lambda *model: _start_of(sorted(folder.glob("start-*.zst")), *model)


def find(folder: Path, vocabulary: TokenVocabulary, blob: Blob) -> FormCoder | None:
    """The form that reads a blob, with the files kept for it; None if none were kept. UnknownModel
    if they are damaged."""
    if blob.form.name == Mix.name:
        prior = _table(_table_path(folder, blob.model))
        return None if prior is None else Mix(vocabulary, prior)
    path = _model_path(folder, blob.model)
    if blob.form.name != Network.name or not path.exists():
        return None
    for prior in () if _start_path(folder, blob.model).exists() else _tables(folder):
        try:
            network = mini.mini_network(vocabulary, path, prior)
        except UnknownModel:
            continue  # the model belongs to another table
        if network.model == blob.model:
            return network
    return _student(folder, vocabulary, blob.model)


def _student(folder: Path, vocabulary: TokenVocabulary, name: bytes) -> Student:
    path, start = _model_path(folder, name), _start_path(folder, name)
    student = Student(vocabulary, path, lambda *model: _start_of([start], *model))
    if student.model != name:
        raise UnknownModel(f"The model {path} or its table is damaged: put a copy of it there.")
    return student


def _start_of(paths: Sequence[Path], model: bytes, n_ctx: int, n_tokens: int) -> MixStart | None:
    for path in paths:
        try:
            start = unpack(path.read_bytes(), n_tokens)
        except (OSError, UnknownModel):
            continue  # damaged, or of another model
        if _start_path(path.parent, network_hash(start.name, model, n_ctx)) == path:
            return start
    return None


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


def _student_path(folder: Path, name: bytes) -> Path:
    return folder / f"student-{name.hex()}.gguf"


def _model_path(folder: Path, name: bytes) -> Path:
    student = _student_path(folder, name)
    return student if student.exists() else _mini_path(folder, name)


def _start_path(folder: Path, name: bytes) -> Path:
    return folder / f"start-{name.hex()}.zst"


def _copy(source: Path, path: Path, name: bytes) -> None:
    """Copy a file of this name (`name_of`)."""
    if path.exists():
        return
    data = source.read_bytes()
    if name_of(data) != name:
        raise OSError(
            errno.ESTALE, "the file was replaced since it was read: restart towerd", source
        )
    _write(path, data)


def _write(path: Path, data: bytes) -> None:
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    half = path.with_suffix(".half")
    with folder_locked(path.parent):
        half.unlink(missing_ok=True)  # left by a process that was killed
        try:
            with open(half, "wb", opener=_private) as copy:
                copy.write(data)
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
