"""SealedFiles: files of a store, encrypted by the page.

    0    magic "TWRSEAL\\x01"
    8    u32  number of the store's key
    12   u32  PAGE_BYTES
    16   u64  bytes of the content
    24   nonce 12 and the file's own key, wrapped (AES-256-GCM) with the store's: 48
    84   zeros
    128  pages: AES-256-GCM of PAGE_BYTES each, its tag last; the last one is shorter

Each file has a random key of its own, so that the number of a page is its nonce. Only the wrapped key is ever
written again (`renew`): who loses it cannot read the file.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from towerd.slots.errors import StateError
from towerd.store.encryption.key_source import KEY_BYTES
from towerd.store.encryption.vault import NONCE_BYTES, TAG_BYTES, Vault
from towerd.store.files import durable
from towerd.store.files.directory import Directory
from towerd.store.files.file_map import FileMap, NewFile, open_checked

MAGIC = b"TWRSEAL\x01"
HEADER_BYTES = 128
PAGE_BYTES = 1 << 16
PURPOSE = "files"
_FIXED = struct.Struct("<8sIIQ")
_WRAPPED_BYTES = KEY_BYTES + TAG_BYTES
_SEALED_PAGE = PAGE_BYTES + TAG_BYTES
_HUGE_BYTES_MIN = 1 << 22
"""From this size on, memory comes in huge pages: to have 25 MB decrypted takes 6.5 ms instead of 16, most of which
is the kernel's for each page of 4 KiB."""


def sealed_size(n_bytes: int) -> int:
    """Bytes on the disk of a file with so many bytes of content."""
    return HEADER_BYTES + n_bytes + TAG_BYTES * _n_pages(n_bytes)


def content_size(n_sealed: int) -> int:
    """The inverse. Raises StateError for a size that no file has."""
    n_pages = -(-(n_sealed - HEADER_BYTES) // _SEALED_PAGE)
    n_bytes = n_sealed - HEADER_BYTES - TAG_BYTES * n_pages
    if n_bytes < 1 or sealed_size(n_bytes) != n_sealed:
        raise StateError(f"no sealed file has {n_sealed} bytes")
    return n_bytes


def _n_pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES)


class SealedFiles:
    """The files of a store that has a vault. Thread-safe."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    @contextmanager
    def create(
        self, half: Path, final: Path, n_bytes: int, *, is_durable: bool = True
    ) -> Iterator[NewFile]:
        """See `StoreFiles`."""
        with durable.new_file(half, final, is_durable=is_durable) as fd:
            durable.reserve(fd, sealed_size(n_bytes))
            file = _SealedFile(fd, n_bytes, secrets.token_bytes(KEY_BYTES))
            id = _write_header(fd, self._vault, file.key, n_bytes)
            yield file
            file.finish()
        if id != self._vault.key_ids[0]:  # renewed meanwhile, when the file had no name yet
            with suppress(FileNotFoundError), _opened_to_write(final) as fd:
                _write_header(fd, self._vault, file.key, n_bytes)
                durable.sync(fd)

    def disk_size(self, n_bytes: int) -> int:
        """See `StoreFiles`."""
        return sealed_size(n_bytes)

    def map(self, path: Path, n_bytes: int) -> FileMap:
        """See `StoreFiles`. Its pages are decrypted when they are needed."""
        fd = open_checked(path, sealed_size(n_bytes))
        try:
            return self._opened(fd, n_bytes)
        finally:
            os.close(fd)

    def read(self, path: Path, n_bytes_max: int | None = None) -> memoryview:
        """See `StoreFiles`."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            n_bytes = content_size(os.fstat(fd).st_size)
            found = self._opened(fd, n_bytes)
        finally:
            os.close(fd)
        return found.view(0, n_bytes if n_bytes_max is None else min(n_bytes, n_bytes_max + 1))

    def _opened(self, fd: int, n_bytes: int) -> FileMap:
        try:
            key = _file_key(self._vault, os.pread(fd, HEADER_BYTES, 0), n_bytes)
        except StateError:  # once more: `renew` may have been half done
            key = _file_key(self._vault, os.pread(fd, HEADER_BYTES, 0), n_bytes)
        return _decrypting(fd, n_bytes, key)

    def renew(self, path: Path) -> bool:
        """Wrap a file's key with the store's key in use; whether it was wrapped with another one. Raises OSError, or
        StateError if its header is damaged."""
        with _opened_to_write(path) as fd:
            n_bytes = content_size(os.fstat(fd).st_size)
            header = os.pread(fd, HEADER_BYTES, 0)
            key = _file_key(self._vault, header, n_bytes)
            if _FIXED.unpack_from(header)[1] == self._vault.key_ids[0]:
                return False
            _write_header(fd, self._vault, key, n_bytes)
            durable.sync(fd)
            return True


def sealed_paths(directory: Directory) -> Iterator[Path]:
    """The files of an encrypted store that are sealed."""
    for folder in (
        directory.segments,
        directory.checkpoints,
        directory.bases,
        directory.tokenizers,
        directory.media,
    ):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                yield path


def is_sealed(path: Path) -> bool:
    """Whether a file begins as sealed ones do. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(fd, len(MAGIC), 0) == MAGIC
    finally:
        os.close(fd)


@contextmanager
def _opened_to_write(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_header(fd: int, vault: Vault, file_key: bytes, n_bytes: int) -> int:
    """Returns the number of the store's key that wraps the file's. Raises OSError."""
    id, key = vault.key_in_use(PURPOSE)
    fixed = _FIXED.pack(MAGIC, id, PAGE_BYTES, n_bytes)
    nonce = secrets.token_bytes(NONCE_BYTES)
    wrapped = AESGCM(key).encrypt(nonce, file_key, fixed)
    header = (fixed + nonce + wrapped).ljust(HEADER_BYTES, b"\0")
    durable.write_all(fd, memoryview(header), 0)
    return id


def _file_key(vault: Vault, header: bytes, n_bytes: int) -> bytes:
    """Raises StateError."""
    fixed, at = header[: _FIXED.size], _FIXED.size + NONCE_BYTES
    if len(header) < HEADER_BYTES:
        raise StateError("the file ends in its header")
    magic, id, page_bytes, listed = _FIXED.unpack(fixed)
    if (magic, page_bytes, listed) != (MAGIC, PAGE_BYTES, n_bytes):
        raise StateError("it is no sealed file, or of another size or version")
    cipher = AESGCM(vault.key(PURPOSE, id))
    try:
        return cipher.decrypt(header[_FIXED.size : at], header[at : at + _WRAPPED_BYTES], fixed)
    except InvalidTag:
        raise StateError("the file's key is damaged, or of another store") from None


def _nonce(page: int) -> bytes:
    return page.to_bytes(NONCE_BYTES, "little")


class _SealedMap(FileMap):
    """Memory into which pages are decrypted when they are needed."""

    def decrypts(self, sealed: mmap.mmap, key: bytes) -> None:
        """sealed: the file. Called once, before anything else."""
        self._sealed = sealed
        self._cipher = AESGCM(key)
        self._is_there = bytearray(_n_pages(len(self)))

    def need(self, at: int, n_bytes: int) -> None:
        """In this thread: `cryptography` keeps the interpreter's lock, so that several would only wait for it. Two may
        decrypt one page, to the same bytes."""
        if n_bytes <= 0:
            return
        sealed, plain = memoryview(self._sealed), memoryview(self)
        for page in range(at // PAGE_BYTES, _n_pages(at + n_bytes)):
            if self._is_there[page]:
                continue
            begin, to = HEADER_BYTES + page * _SEALED_PAGE, page * PAGE_BYTES
            content = plain[to : to + PAGE_BYTES]
            try:
                self._cipher.decrypt_into(
                    _nonce(page), sealed[begin : begin + _SEALED_PAGE], None, content
                )
            except InvalidTag:
                raise StateError("a page is damaged") from None
            self._is_there[page] = 1

    def give_back(self) -> None:
        """Of the file alone: what was decrypted is nowhere else, and may be in use."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._sealed.madvise(mmap.MADV_DONTNEED)


def _decrypting(fd: int, n_bytes: int, key: bytes) -> FileMap:
    sealed = mmap.mmap(fd, sealed_size(n_bytes), prot=mmap.PROT_READ)
    found = _SealedMap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if n_bytes >= _HUGE_BYTES_MIN and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            found.madvise(mmap.MADV_HUGEPAGE)
    found.decrypts(sealed, key)
    return found


class _SealedFile:
    """A file that is being written: a page leaves for the disk when it is full, those with gaps at the end."""

    def __init__(self, fd: int, n_bytes: int, key: bytes) -> None:
        self.key = key
        self._fd = fd
        self._n_bytes = n_bytes
        self._cipher = AESGCM(key)
        self._lock = threading.Lock()
        self._pages: dict[int, tuple[bytearray, int]] = {}
        """Bytes, and how many of them were written, of the pages that are not full."""
        self._is_written = bytearray(_n_pages(n_bytes))

    def write(self, data: memoryview, at: int) -> None:
        """See `NewFile`."""
        data = data.cast("B")
        assert at + len(data) <= self._n_bytes
        while data:
            page, offset = divmod(at, PAGE_BYTES)
            piece = data[: PAGE_BYTES - offset]
            if len(piece) == self._page_bytes(page):
                self._seal(page, piece)
            else:
                self._fill(page, offset, piece)
            data, at = data[len(piece) :], at + len(piece)

    def read_back(self) -> FileMap:
        """See `NewFile`."""
        self.finish()
        return _decrypting(self._fd, self._n_bytes, self.key)

    def finish(self) -> None:
        """Write what is left, with zeros where nothing was written. Raises OSError."""
        for page in [page for page, done in enumerate(self._is_written) if not done]:
            content, _ = self._pages.pop(page, (bytearray(self._page_bytes(page)), 0))
            self._seal(page, memoryview(content))

    def _page_bytes(self, page: int) -> int:
        return min(PAGE_BYTES, self._n_bytes - page * PAGE_BYTES)

    def _fill(self, page: int, offset: int, piece: memoryview) -> None:
        size = self._page_bytes(page)
        with self._lock:
            content, n = self._pages.get(page) or (bytearray(size), 0)
            content[offset : offset + len(piece)] = piece
            self._pages[page] = content, n + len(piece)
            if n + len(piece) < size:
                return
            del self._pages[page]
        self._seal(page, memoryview(content))

    def _seal(self, page: int, content: memoryview) -> None:
        assert not self._is_written[page], "a page is sealed once"
        self._is_written[page] = 1
        sealed = self._cipher.encrypt(_nonce(page), content, None)
        durable.write_all(self._fd, memoryview(sealed), HEADER_BYTES + page * _SEALED_PAGE)
