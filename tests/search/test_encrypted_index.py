"""The search index of an encrypted store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from encrypted_stores import encrypt

from towerd.errors import Unavailable
from towerd.search.file import FILE_NAME
from towerd.search.index import Passage, SearchIndex, SessionKey
from towerd.store.encryption.vault import Vault

KEYS = [SessionKey("t" * 64, "tenant", f"session-{n}") for n in range(40)]
WORDS = (b"zebra", b"session-", b"tenant", b"question")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    encrypt(tmp_path / "store")
    return tmp_path / "store"


def fill(index: SearchIndex) -> None:
    for n, key in enumerate(KEYS):
        index.add(key, 1.0, [Passage(1, 1.0, f"a zebra, and number{n}")], "the question")


def found(index: SearchIndex) -> int:
    return len(index.search("zebra", "tenant", 100))


def opened(root: Path) -> SearchIndex:
    """As a process with its own copy of the keys opens it."""
    return SearchIndex(root / FILE_NAME, vault=Vault.open(root))


def files(root: Path) -> Iterator[Path]:
    return root.glob(FILE_NAME + "*")


def test_words_are_found_and_in_no_file(root: Path) -> None:
    with closing(opened(root)) as index:
        fill(index)
        assert found(index) == len(KEYS)
        assert len(index.search("number7", "tenant", 9)) == 1
        assert index.search("zebra", "another", 9) == []
        index.forget(KEYS[:5])
        assert index.scrub()
        assert index.size()[1] == (root / FILE_NAME).stat().st_size
        assert len(list(files(root))) == 3
        for path in files(root):
            assert not any(word in path.read_bytes() for word in WORDS), path
    with closing(opened(root)) as index:
        assert found(index) == len(KEYS) - 5


def test_a_damaged_index_is_filled_again(root: Path) -> None:
    with closing(opened(root)) as index:
        fill(index)
    data = bytearray((root / FILE_NAME).read_bytes())
    for at in range(2000, len(data), 4096):
        data[at] ^= 1
    (root / FILE_NAME).write_bytes(data)
    with closing(opened(root)) as index:
        assert index.keys() == []
        fill(index)
        assert found(index) == len(KEYS)


def test_an_index_with_a_damaged_page(root: Path) -> None:
    """It is known for damaged when that page is read, and an empty one takes its place."""
    with closing(opened(root)) as index:
        fill(index)
    data = bytearray((root / FILE_NAME).read_bytes())
    for at in range(4096 + 2000, len(data), 4096):
        data[at] ^= 1
    (root / FILE_NAME).write_bytes(data)
    with closing(opened(root)) as index:
        with pytest.raises(Unavailable):
            found(index)
        index.repair()
        fill(index)
        assert found(index) == len(KEYS)


def test_a_renewed_key(root: Path) -> None:
    """Nothing is lost, another process notices, and the earlier key is not needed."""
    vault = Vault.open(root)
    with (
        closing(SearchIndex(root / FILE_NAME, vault=vault)) as index,
        closing(opened(root)) as other,
    ):
        fill(index)
        assert found(other) == len(KEYS)
        with vault.renewing():
            assert found(index) == len(KEYS)
            index.renew_key()
        assert found(index) == found(other) == len(KEYS)
        other.add(SessionKey("t" * 64, "tenant", "new"), 1.0, [Passage(1, 1.0, "a zebra")])
        assert found(index) == len(KEYS) + 1
    with closing(opened(root)) as index:
        assert found(index) == len(KEYS) + 1


def test_a_plain_store_meets_an_encrypted_index(root: Path) -> None:
    """And the other way round: it is derived, and begun anew."""
    with closing(opened(root)) as index:
        fill(index)
    with closing(SearchIndex(root / FILE_NAME)) as index:
        assert index.keys() == []
        fill(index)
    with closing(opened(root)) as index:
        assert index.keys() == []
