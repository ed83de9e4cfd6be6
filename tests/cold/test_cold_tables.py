"""A store that was frozen by one release is read by the next, which brings another table."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_tools import ROW_IDENTITY, turn_of

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.codec import Codec
from towerd.codec.forms import mini
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import Coding, VocabularySource, freeze, thaw
from towerd.errors import DiskFull, ThawError
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.transfer import export_session

TEXT = b"Once there was a dog who liked to run in the park with his friend Tom. " * 4
MakeCodec = Callable[..., Codec]
Release = Callable[[int], None]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Release]:
    """`release(n)`: from now on, the package has table number n."""
    original = file.PATH

    def become(number: int) -> None:
        path = tmp_path / f"release-{number}.gguf"
        shutil.copyfile(original, path)
        with path.open("ab") as table:  # says the same under another name
            table.write(b"\0" * number)
        monkeypatch.setattr(file, "PATH", path)
        file.bundled.cache_clear()

    yield become
    monkeypatch.undo()
    file.bundled.cache_clear()


@pytest.fixture
def make_codec() -> Iterator[MakeCodec]:
    with GgufVocabulary(bundled_model()) as vocabulary:
        yield lambda **options: Codec(vocabulary, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as opened:
        yield opened


def say(store: Store, codec: Codec, session: str = "x") -> list[int]:
    ids = [int(each) for each in codec.vocabulary.tokenize(TEXT)]
    store.commit_turn(turn_of(ids[:-3], ids[-3:], session=session))
    return ids


def said(store: Store, session: str = "x") -> list[int]:
    history = store.history(session)
    ids: list[int] = history.ids(history.leaf).tolist()
    return ids


def test_thaws_after_an_upgrade(store: Store, release: Release, make_codec: MakeCodec) -> None:
    release(1)
    old = make_codec(tables=store.tables)
    ids = say(store, old)
    freeze(store, old, "x")
    freeze(store, old, "x")  # frozen already, and the table is here
    release(2)
    with pytest.raises(ThawError, match="use the version of towerd that wrote it"):
        thaw(store, make_codec(), "x")
    new = make_codec(tables=store.tables)
    assert thaw(store, new, "x")
    assert said(store) == ids
    freeze(store, new, "x")  # the blob was kept, and is good
    assert len(list(store.tables.iterdir())) == 1
    assert thaw(store, new, "x")
    freeze(store, new, "x", form="mix")
    assert len(list(store.tables.iterdir())) == 2
    assert thaw(store, new, "x")
    assert said(store) == ids


def test_a_damaged_table_is_no_table(store: Store, release: Release, make_codec: MakeCodec) -> None:
    """The session stays as it is, and thaws once the table is there again."""
    release(1)
    old = make_codec(tables=store.tables)
    ids = say(store, old)
    freeze(store, old, "x")
    (kept,) = store.tables.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + b"\1")
    release(2)
    with pytest.raises(ThawError, match=r"mix-[0-9a-f]+\.gguf is damaged"):
        thaw(store, make_codec(tables=store.tables), "x")
    kept.write_bytes(b"not a table")
    with pytest.raises(ThawError, match="is not a table"):
        thaw(store, make_codec(tables=store.tables), "x")
    kept.write_bytes(whole)
    assert thaw(store, make_codec(tables=store.tables), "x")
    assert said(store) == ids


def test_thaws_with_the_mini_model_it_was_frozen_with(
    store: Store,
    release: Release,
    make_codec: MakeCodec,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Releases with a table and a mini model each, with one of them alike, and without a model."""

    def become(table: int, model: int | None) -> Codec:
        release(table)
        path = tmp_path / f"mini-{table}-{model}.gguf"
        monkeypatch.setattr(mini, "PATH", path)
        if model is not None:
            shape = Shape(1, 32, 2, 1, 64, 1, n_ctx_train=64)
            make_random_gguf(path, shape, vocab=file.PATH, seed=model)
        codec: Codec = make_codec(tables=store.tables)
        return codec

    wanted = {}
    for table, model in ((1, 1), (2, 1), (2, 2)):
        codec, name = become(table, model), f"{table}-{model}"
        wanted[name] = say(store, codec, name)
        freeze(store, codec, name, form="network")
    assert len(list(store.tables.glob("mini-*"))) == 3
    assert len(list(store.tables.glob("mix-*"))) == 2
    (kept, *_) = store.tables.glob("mini-*")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-4] + b"\1\1\1\1")
    codec = become(3, None)
    fails = []
    for name in wanted:
        try:
            thaw(store, codec, name)
        except ThawError as error:
            fails.append(str(error))
    assert len(fails) == 1
    assert f"{kept.name} or its table is damaged" in fails[0]
    kept.write_bytes(whole)
    codec = become(3, 3)
    for name, ids in wanted.items():
        thaw(store, codec, name)
        assert said(store, name) == ids


def test_kept_whole_or_not_at_all(
    store: Store, make_codec: MakeCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is frozen on a disk that has no room for what it would be read with."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    codec = make_codec(tables=store.tables)
    ids = say(store, codec)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="cannot be kept"):
        freeze(store, codec, "x")
    assert not list(store.tables.iterdir())
    assert said(store) == ids
    monkeypatch.undo()
    store.tables.joinpath(f"mix-{file.bundled().name.hex()}.half").write_bytes(b"killed meanwhile")
    freeze(store, codec, "x")
    (kept,) = store.tables.iterdir()
    assert kept.read_bytes() == file.PATH.read_bytes()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_what_needs_no_table_brings_none(store: Store, make_codec: MakeCodec) -> None:
    codec = make_codec(tables=store.tables)
    say(store, codec)
    freeze(store, codec, "x", form="packed")
    assert not store.tables.exists()


def test_a_tower_file_needs_no_table(store: Store, release: Release, make_codec: MakeCodec) -> None:
    """Exported by one release, imported by the next."""
    from towerd import tower_file

    release(1)
    coding = Coding(lambda: VocabularySource(bundled_model(), "hash"), tables=store.tables)
    ids = say(store, coding.codec)
    data = export_session(store, coding.model(), "x", None).session
    coding.close()
    release(2)
    coding = Coding(lambda: VocabularySource(bundled_model(), "hash"))
    history = tower_file.read(data).history
    assert history.ids(history.leaf).tolist() == ids
    coding.close()
