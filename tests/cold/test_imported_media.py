"""Pictures of `.tower` files that are imported where their session is: what is good here stays, and what is damaged is
mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, turn_of

from towerd import tower_file
from towerd.codec import Codec
from towerd.cold.coding import SessionModel
from towerd.store import Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.sessions.history import MEDIA_MAX
from towerd.store.sessions.media import (
    KeptMedium,
    MediaTable,
    SentMedium,
    file_digest,
    medium_key,
)
from towerd.transfer import Export, export_foreign, export_session, import_session

SEEN = [-(1 << 31), -5, -6]
PICTURE = SentMedium(medium_key(np.array(SEEN, np.int32)), b"picture!" * 999)
LIE = b"another picture"


def talk(store: Store) -> None:
    turn = turn_of([1, 300, *SEEN, 301], [2], session="chat")
    store.commit_turn(replace(turn, media=[PICTURE]))


def file_of(store: Store, export: Export) -> bytes:
    (entry,) = export.files
    data = store.media.read(entry)
    assert data is not None
    return export.session + data


def lying(data: bytes) -> bytes:
    """The same file, which says that the picture is another one."""
    file = tower_file.read(data)
    media = tuple(replace(each, digest=file_digest(LIE), n_bytes=len(LIE)) for each in file.media)
    return tower_file.write(replace(file, media=media)) + LIE


def seen(store: Store, tokenizer: str = "") -> bytes | None:
    row = store.media.session("chat", "local", tokenizer)
    assert row is not None
    return store.media.file(row, PICTURE.key)


def test_a_picture_that_is_here_stays(
    tmp_path: Path, codec: Codec, here: SessionModel, there: SessionModel
) -> None:
    """Whatever a file says that it is; of a session of another tokenizer, too."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        words = KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)
        store.vocabularies.keep(store.state.identity.tokenizer_digest, words)
        talk(store)
        honest = file_of(store, export_session(store, here, "chat", None, with_media=True))
        found = import_session(store, here, lying(honest), "local")
        assert found["media"] == {"kept": 1, "damaged": 0, "not_kept": 0}
        assert seen(store) == PICTURE.file
        digest = store.state.identity.tokenizer_digest.hex()
    with Store.open(tmp_path, OTHER_TOKENIZER) as store:
        data = file_of(store, export_foreign(store, "chat", None, with_media=True))
        found = import_session(store, there, lying(data), "local")
        assert found["media"] == {"kept": 1, "damaged": 0, "not_kept": 0}
        assert seen(store, digest) == PICTURE.file


def test_a_shared_picture_is_read_once(
    tmp_path: Path, here: SessionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many media of an imported session are made of it."""
    n, read, reads = 9, MediaTable.read, []
    ids = [[-(1 << 31), -5, -6 - each] for each in range(n)]
    media = [
        replace(PICTURE, key=medium_key(np.array(each, np.int32)), ordinal=ordinal)
        for ordinal, each in enumerate(ids)
    ]

    def counted(table: MediaTable, entry: KeptMedium) -> bytes | None:
        reads.append(entry.name)
        return read(table, entry)

    with Store.open(tmp_path, ROW_IDENTITY) as store:
        turn = turn_of([1, *(each for medium in ids for each in medium), 301], [2], session="chat")
        store.commit_turn(replace(turn, media=media))
        data = file_of(store, export_session(store, here, "chat", None, with_media=True))
        monkeypatch.setattr(MediaTable, "read", counted)
        found = import_session(store, here, data, "local")
        assert found["media"] == {"kept": n, "damaged": 0, "not_kept": 0}
        assert len(reads) == 1


def test_what_a_file_cannot_say_is_left_out(tmp_path: Path, here: SessionModel) -> None:
    """A medium of a picture that has more of them than a file may number."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        turn = turn_of([1, 300, *SEEN, 301], [2], session="chat")
        store.commit_turn(replace(turn, media=[replace(PICTURE, ordinal=MEDIA_MAX)]))
        export = export_session(store, here, "chat", None, with_media=True)
        assert (export.files, export.n_media, export.n_left_out) == ((), 0, 1)
        assert tower_file.read(export.session).media == ()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_flip, Path.unlink])
def test_a_damaged_picture_is_mended(
    tmp_path: Path, here: SessionModel, damage: Callable[[Path], None]
) -> None:
    """By the file that has it; what was damaged is deleted."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        talk(store)
        data = file_of(store, export_session(store, here, "chat", None, with_media=True))
        (path,) = (tmp_path / "media").iterdir()
        damage(path)
        assert seen(store) is None
        found = import_session(store, here, data, "local")
        assert found["media"] == {"kept": 1, "damaged": 0, "not_kept": 0}
        assert seen(store) == PICTURE.file
        (path,) = (tmp_path / "media").iterdir()
        assert path.read_bytes() == PICTURE.file
        assert store.verify().ok
