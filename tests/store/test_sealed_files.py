"""Files of an encrypted store: what was written comes back, reads as noise on the disk, and damage is found."""

from __future__ import annotations

import os
import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from towerd.slots.errors import StateError
from towerd.store.encryption.key_source import KeySource
from towerd.store.encryption.page_cipher import PAGE_BYTES
from towerd.store.encryption.sealed_files import (
    HEADER_BYTES,
    SealedFiles,
    content_size,
    sealed_size,
)
from towerd.store.encryption.vault import Vault

SIZES = (1, 15, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES + 777)


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    (tmp_path / "store").mkdir()
    source = KeySource("file", tmp_path / "key")
    return Vault.create(tmp_path / "store", source, is_encrypting=False)


def written(files: SealedFiles, path: Path, content: bytes, cuts: list[int]) -> None:
    """Write a file in the pieces between `cuts`, in another order and by several threads."""
    pieces = list(zip([0, *cuts], [*cuts, len(content)], strict=True))
    random.Random(len(content)).shuffle(pieces)
    with files.create(path.with_suffix(".half"), path, len(content)) as file:
        with ThreadPoolExecutor(4) as pool:
            list(
                pool.map(
                    lambda cut: file.write(memoryview(content)[cut[0] : cut[1]], cut[0]), pieces
                )
            )


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_comes_back(vault: Vault, tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    cuts = sorted(random.Random(size).sample(range(1, size), min(size - 1, 9)))
    files, path = SealedFiles(vault), tmp_path / "a"
    written(files, path, content, cuts)
    assert path.stat().st_size == sealed_size(size) == files.disk_size(size)
    assert content_size(sealed_size(size)) == size
    assert bytes(files.read(path)) == content
    assert bytes(files.read(path, 3)) == content[:4]
    found = SealedFiles(Vault.open(tmp_path / "store")).map(path, size)
    at = size // 2
    assert bytes(found.view(at, size - at)) == content[at:]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda at: found.need(at, size - at), range(0, size, size // 4 + 1)))
    found.give_back()  # where RAM is short
    assert bytes(found.whole()) == content
    raw = path.read_bytes()
    assert all(content[i : i + 8] not in raw for i in range(0, size - 8, size // 99 + 1))


def test_gaps_are_zeros(vault: Vault, tmp_path: Path) -> None:
    size, path = 3 * PAGE_BYTES, tmp_path / "a"
    with SealedFiles(vault).create(tmp_path / "half", path, size) as file:
        file.write(memoryview(b"end"), size - 3)
        file.write(memoryview(b"begin"), 0)
        assert bytes(file.read_back().view(0, 6)) == b"begin\0"
    content = bytes(SealedFiles(vault).map(path, size).whole())
    assert content == b"begin".ljust(size - 3, b"\0") + b"end"


def test_a_failed_file_is_not_there(vault: Vault, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        with SealedFiles(vault).create(tmp_path / "half", tmp_path / "a", 99):
            raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "store"]


def test_every_flipped_bit_is_found(vault: Vault, tmp_path: Path) -> None:
    content, path = secrets.token_bytes(PAGE_BYTES + 999), tmp_path / "a"
    files = SealedFiles(vault)
    written(files, path, content, [])
    sound = path.read_bytes()
    header = [*range(84), HEADER_BYTES, len(sound) - 1]
    for at in [*header, *random.Random(1).sample(range(HEADER_BYTES, len(sound)), 50)]:
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(StateError):
            files.map(path, len(content)).whole()
    for cut in (sound[:-1], sound[:50], sound + b"\0", b""):
        path.write_bytes(cut)
        with pytest.raises(StateError):
            files.map(path, len(content))
    path.write_bytes(sound)
    assert bytes(files.map(path, len(content)).whole()) == content


def test_a_page_of_another_place_or_file_is_damage(vault: Vault, tmp_path: Path) -> None:
    files, page = SealedFiles(vault), PAGE_BYTES + 16
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        written(files, path, bytes(2 * PAGE_BYTES), [])
    sound, other = one.read_bytes(), two.read_bytes()
    first, second = sound[HEADER_BYTES:][:page], sound[HEADER_BYTES + page :]
    for changed in (second + first, first + first, other[HEADER_BYTES:]):
        one.write_bytes(sound[:HEADER_BYTES] + changed)
        with pytest.raises(StateError, match="page is damaged"):
            files.map(one, 2 * PAGE_BYTES).whole()


def test_a_renewed_key_reads_what_stays_and_nothing_that_was_before(
    vault: Vault, tmp_path: Path
) -> None:
    """A copy of a file from before the renewal, and a copy of the store's keys from then: with the key that opens
    the store they could be read, with what is left of them they cannot."""
    files, kept, gone = SealedFiles(vault), tmp_path / "kept", tmp_path / "gone"
    for path in (kept, gone):
        written(files, path, b"words" * 99, [])
    taken = gone.read_bytes()
    gone.unlink()
    with vault.renewing():
        assert files.renew(kept)
        assert not files.renew(kept)
        assert bytes(Vault.open(tmp_path / "store").unseal("x", vault.seal("x", b"y"))) == b"y"
    gone.write_bytes(taken)
    for each in (vault, Vault.open(tmp_path / "store")):
        assert bytes(SealedFiles(each).read(kept)) == b"words" * 99
        with pytest.raises(StateError, match="destroyed"):
            SealedFiles(each).read(gone)
    assert vault.key_ids == [2]


def test_one_damaged_copy_of_the_keys_loses_nothing(vault: Vault, tmp_path: Path) -> None:
    sealed, root = vault.seal("x", b"kept"), tmp_path / "store"
    sound = (root / "keys.json").read_bytes()
    for name in ("keys.json", "keys.copy"):
        for at in range(0, len(sound), 7):
            damaged = bytearray(sound)
            damaged[at] ^= 4
            (root / name).write_bytes(damaged)
            opened = Vault.open(root)
            assert opened.unseal("x", sealed) == b"kept"
            assert (root / name).read_bytes() == damaged  # who only reads changes nothing
            opened.heal()
            assert (root / "keys.json").read_bytes() == (root / "keys.copy").read_bytes()
        os.unlink(root / name)
        opened = Vault.open(root)
        assert opened.unseal("x", sealed) == b"kept"
        opened.heal()
        assert (root / name).exists()


def test_another_process_notices_new_keys(vault: Vault, tmp_path: Path) -> None:
    other = Vault.open(tmp_path / "store")
    with vault.renewing():
        assert other.unseal("x", vault.seal("x", b"a")) == b"a"
        assert vault.unseal("x", other.seal("x", b"b")) == b"b"
    assert other.key_ids == vault.key_ids == [2]
    with other.renewing():  # after one that it has not looked at yet
        assert vault.unseal("x", other.seal("x", b"b")) == b"b"
    with Vault.open(tmp_path / "store").renewing():
        pass
    assert other.key_ids == vault.key_ids == [4]


def test_one_renewal_at_a_time(vault: Vault, tmp_path: Path) -> None:
    """Each destroys the keys of before it, never the one in use: what is sealed anew by each can be read."""
    kept = vault.seal("x", b"kept")

    def renew(_: int) -> None:
        nonlocal kept
        mine = Vault.open(tmp_path / "store")
        with mine.renewing():
            kept = mine.seal("x", mine.unseal("x", kept))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(renew, range(20)))
    assert vault.unseal("x", kept) == b"kept"
    assert vault.key_ids == [21]


def test_a_file_that_gets_its_name_after_a_renewal(vault: Vault, tmp_path: Path) -> None:
    files, path = SealedFiles(vault), tmp_path / "a"
    with files.create(tmp_path / "half", path, 5) as file:
        file.write(memoryview(b"words"), 0)
        with Vault.open(tmp_path / "store").renewing():
            pass
    assert bytes(SealedFiles(Vault.open(tmp_path / "store")).read(path)) == b"words"


def test_a_backup_by_hard_links_stays(vault: Vault, tmp_path: Path) -> None:
    root = tmp_path / "store"
    os.link(root / "keys.json", tmp_path / "backup")
    before = (root / "keys.json").read_bytes()
    with vault.renewing():
        pass
    assert (tmp_path / "backup").read_bytes() == before != (root / "keys.json").read_bytes()


def test_a_failed_renewal_destroys_nothing(vault: Vault, tmp_path: Path) -> None:
    sealed = vault.seal("x", b"kept")
    with pytest.raises(KeyError):
        with vault.renewing():
            raise KeyError
    assert Vault.open(tmp_path / "store").unseal("x", sealed) == b"kept"
    with vault.renewing():
        pass
    assert vault.key_ids == [3]
