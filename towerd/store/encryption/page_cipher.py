"""PageCipher: decrypts pages of sealed files, by the libcrypto of this process where it has one, else by `cryptography`.

Both read the same pages. `cryptography` keeps the interpreter's lock while it decrypts. Libraries that need OpenSSL have
brought one into the process, whose functions C++ code calls without the lock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from towerd.kernels._native import decrypt_pages
from towerd.slots.errors import StateError
from towerd.store.encryption.key_source import KEY_BYTES
from towerd.store.encryption.vault import NONCE_BYTES, TAG_BYTES

log = logging.getLogger(__name__)

PAGE_BYTES = 1 << 16
SEALED_PAGE = PAGE_BYTES + TAG_BYTES
_FUNCTIONS = (
    "EVP_CIPHER_CTX_new",
    "EVP_CIPHER_CTX_free",
    "EVP_aes_256_gcm",
    "EVP_DecryptInit_ex",
    "EVP_DecryptUpdate",
    "EVP_CIPHER_CTX_ctrl",
    "EVP_DecryptFinal_ex",
)
_HAVE_LIBCRYPTO = ("sqlcipher3._sqlite3", "_hashlib")
"""Modules that are linked with one. That of sqlcipher3, which an encrypted store needs, is newer than most systems' and
twice as fast."""


def nonce_of(page: int) -> bytes:
    """The nonce of a page of a file, by its number."""
    return page.to_bytes(NONCE_BYTES, "little")


class PageCipher:
    """Decrypts pages of one file. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def decrypt(self, sealed: memoryview, plain: memoryview, first: int) -> None:
        """Consecutive pages, each with its tag behind it, the last one perhaps shorter. first: the number of the first.
        Raises StateError if any is damaged; what `plain` has then means nothing."""
        functions = libcrypto()
        if functions is None:
            is_sound = decrypt_by_reference(self._key, sealed, plain, first)
        else:
            is_sound = decrypt_pages(functions, self._key, sealed, plain, PAGE_BYTES, first)
        if not is_sound:
            raise StateError("a page is damaged")


def decrypt_by_reference(key: bytes, sealed: memoryview, plain: memoryview, first: int) -> bool:
    """Decrypt pages with `cryptography`; False: one is damaged."""
    cipher = AESGCM(key)
    for i in range(-(-len(plain) // PAGE_BYTES)):
        content = plain[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]
        page = sealed[i * SEALED_PAGE : (i + 1) * SEALED_PAGE]
        try:
            cipher.decrypt_into(nonce_of(first + i), page, None, content)
        except InvalidTag:
            return False
    return True


@functools.cache
def libcrypto() -> Sequence[int] | None:
    """The addresses of the functions that `decrypt_pages` calls; None: no library has them, or they do not agree with
    `cryptography`."""
    for name in _HAVE_LIBCRYPTO:
        with suppress(ImportError, OSError, AttributeError):  # built in, or its symbols are hidden
            library = ctypes.CDLL(str(importlib.import_module(name).__file__))
            found = [ctypes.cast(library[each], ctypes.c_void_p).value or 0 for each in _FUNCTIONS]
            if _agree(found):
                log.debug("pages are decrypted by the libcrypto of %s", name)
                return found
    return None


def _agree(functions: Sequence[int]) -> bool:
    """Whether a page is read that `cryptography` wrote, and one that is damaged is refused."""
    key, content, page = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(999), 300
    sealed = bytearray(AESGCM(key).encrypt(nonce_of(page), content, None))
    plain = bytearray(len(content))
    is_read = decrypt_pages(functions, key, sealed, plain, PAGE_BYTES, page) and plain == content
    sealed[-1] ^= 1
    return is_read and not decrypt_pages(functions, key, sealed, plain, PAGE_BYTES, page)
