"""Pages of sealed files: both ways to decrypt them read what `cryptography` wrote, and refuse the same."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from towerd.kernels._native import decrypt_pages
from towerd.slots.errors import StateError
from towerd.store.encryption import page_cipher
from towerd.store.encryption.page_cipher import (
    PAGE_BYTES,
    SEALED_PAGE,
    PageCipher,
    decrypt_by_reference,
    libcrypto,
    nonce_of,
)

KEY = secrets.token_bytes(32)
SIZES = (1, 16, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES + 777)
FIRSTS = (0, 1, 255, 256, 70_000, 2**33)
Decrypt = Callable[[bytes, memoryview, memoryview, int], bool]


def by_libcrypto(key: bytes, sealed: memoryview, plain: memoryview, first: int) -> bool:
    functions = libcrypto()
    assert functions is not None, "sqlcipher3 brings one"
    return decrypt_pages(functions, key, sealed, plain, PAGE_BYTES, first)


WAYS = [by_libcrypto, decrypt_by_reference]


def sealed_pages(content: bytes, first: int) -> bytes:
    cipher = AESGCM(KEY)
    pages = [content[at : at + PAGE_BYTES] for at in range(0, len(content), PAGE_BYTES)]
    return b"".join(cipher.encrypt(nonce_of(first + i), p, None) for i, p in enumerate(pages))


@pytest.mark.parametrize("decrypt", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_what_was_sealed_is_read(decrypt: Decrypt, size: int) -> None:
    content = random.Random(size).randbytes(size)
    for first in FIRSTS:
        plain = bytearray(size)
        assert decrypt(KEY, memoryview(sealed_pages(content, first)), memoryview(plain), first)
        assert plain == content


@pytest.mark.parametrize("decrypt", WAYS)
def test_damage_is_refused(decrypt: Decrypt) -> None:
    """A flipped bit anywhere, another key, and pages that changed places."""
    content = random.Random(1).randbytes(2 * PAGE_BYTES + 99)
    sealed, plain = sealed_pages(content, 7), memoryview(bytearray(len(content)))
    second = SEALED_PAGE
    tags = [PAGE_BYTES, SEALED_PAGE - 1, len(sealed) - 16, len(sealed) - 1]
    for at in [0, second, *tags, *random.Random(2).sample(range(len(sealed)), 40)]:
        damaged = bytearray(sealed)
        damaged[at] ^= 1 << at % 8
        assert not decrypt(KEY, memoryview(damaged), plain, 7)
    swapped = sealed[second : 2 * second] + sealed[:second] + sealed[2 * second :]
    assert not decrypt(KEY, memoryview(swapped), plain, 7)
    assert not decrypt(KEY, memoryview(sealed), plain, 8)
    assert not decrypt(secrets.token_bytes(32), memoryview(sealed), plain, 7)
    assert decrypt(KEY, memoryview(sealed), plain, 7)


@pytest.mark.parametrize("has_library", [True, False])
def test_the_same_error_either_way(monkeypatch: pytest.MonkeyPatch, has_library: bool) -> None:
    if not has_library:
        monkeypatch.setattr(page_cipher, "libcrypto", lambda: None)
    sealed, plain = bytearray(sealed_pages(b"words", 0)), bytearray(5)
    PageCipher(KEY).decrypt(memoryview(sealed), memoryview(plain), 0)
    assert plain == b"words"
    sealed[2] ^= 1
    with pytest.raises(StateError, match="^a page is damaged$"):
        PageCipher(KEY).decrypt(memoryview(sealed), memoryview(plain), 0)


def test_others_run_meanwhile() -> None:
    """The interpreter's lock is not kept: with a switch interval of minutes, only who lets it go is interrupted."""
    size = 64 * PAGE_BYTES
    sealed, plain = memoryview(sealed_pages(bytes(size), 0)), memoryview(bytearray(size))
    counts, is_over = [0], threading.Event()

    def count() -> None:
        while not is_over.is_set():
            counts[0] += 1
            time.sleep(0)

    counting = threading.Thread(target=count)
    before, n = sys.getswitchinterval(), 0
    counting.start()
    sys.setswitchinterval(600)
    try:
        for _ in range(50):
            n = counts[0]
            assert by_libcrypto(KEY, sealed, plain, 0)
            if counts[0] > n:
                break
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        counting.join()
    assert counts[0] > n


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("functions", {"functions": [1, 2]}),
        ("functions", {"functions": [0] * 7}),
        ("key", {"key": b"short"}),
        ("sealed", {"sealed": bytes(PAGE_BYTES)}),
        ("plain", {"plain": bytes(5)}),
    ],
)
def test_what_does_not_match_is_refused(named: str, wrong: dict[str, object]) -> None:
    """By its name, before anything is called."""
    given: dict[str, object] = {"functions": libcrypto(), "key": KEY, "sealed": bytes(21)}
    given |= {"plain": bytearray(5), "page_bytes": PAGE_BYTES, "first": 0} | wrong
    with pytest.raises(ValueError, match=f"^{named}"):
        partial(decrypt_pages, **given)()  # type: ignore[arg-type]


def test_without_encryption_none_of_it_is_imported() -> None:
    code = (
        "import sys, towerd.service, towerd.engine.embedded.opening\n"
        "found = [name for name in sys.modules if name.startswith(('towerd.store.encryption.', 'sqlcipher3'))]\n"
        "print([name for name in found if name != 'towerd.store.encryption.opening'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
