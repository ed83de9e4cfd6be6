"""`.tower` files of conversations of a tokenizer that is not the served one: out of a store, and into
one. The oracles are the ids that were recorded, and their text from the vocabulary's pieces alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, turn_of

from towerd import tower_file
from towerd.codec import Codec
from towerd.cold import freeze
from towerd.cold.coding import SessionModel
from towerd.errors import InvalidRequest, NotFound, StoreError
from towerd.store import Store
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.vocabularies import KeptVocabulary, KnownWords, some_words
from towerd.store.sessions.history import History, PastTurn
from towerd.store.sessions.media import SentMedium, medium_key
from towerd.tower_file import TowerFileError
from towerd.transfer import export_foreign, export_session, import_session

FORMS = ("packed", "ranked", "text", "mix", "network")
SAID = "Once upon a time there was a little girl who said: “hello, world” €5. ".encode()
STRANGE = [2, 1, 5 + 0xE2, 400, 401, 2]
"""Control tokens, a byte that is no text, and what no tokenizer would write."""


@pytest.fixture
def ids(codec: Codec) -> list[int]:
    return [1, *map(int, codec.vocabulary.tokenize(SAID)), *STRANGE]


def words_of(codec: Codec) -> KeptVocabulary:
    return KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)


def talk(root: Path, codec: Codec, ids: list[int]) -> None:
    """A session with an edited turn, in a store that keeps the vocabulary."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.vocabularies.keep(store.state.identity.tokenizer_digest, words_of(codec))
        store.commit_turn(turn_of(ids[:9], ids[9:12], session="chat"))
        store.commit_turn(turn_of([*ids[:9], 300], [301, 302], session="chat"))
        store.commit_turn(turn_of(ids[:-2], ids[-2:], session="chat"))
        store.rename_session("chat", "A girl")


@pytest.mark.parametrize("form", FORMS)
def test_a_frozen_one_comes_out(
    tmp_path: Path, codec: Codec, here: SessionModel, ids: list[int], form: str
) -> None:
    """Whatever its blob is: read by anyone, and the same session where its tokenizer is served."""
    talk(tmp_path / "a", codec, ids)
    with Store.open(tmp_path / "a", ROW_IDENTITY) as store:
        history = store.history("chat")
        freeze(store, Codec(codec.vocabulary, tables=store.tables), "chat", form=form)
    with Store.open(tmp_path / "a", OTHER_TOKENIZER) as store:
        data = export_foreign(store, "chat", None).session
        assert store.foreign.session("chat").info.cold_bytes > 0
    text = tower_file.read(data).text()
    assert text.startswith("<s> Once upon a time")
    assert words_of(codec).text(np.array(ids[12:], np.int32)) in text
    with Store.open(tmp_path / "b", ROW_IDENTITY) as store:
        assert import_session(store, here, data, "local")["added"] == 3
        found = store.history("chat")
        np.testing.assert_array_equal(found.stream, history.stream)
        assert replace(found, stream=history.stream, updated=history.updated) == history


def test_it_goes_on_where_its_model_is_served_later(
    tmp_path: Path, codec: Codec, here: SessionModel, there: SessionModel, ids: list[int]
) -> None:
    """Imported under another tokenizer: listed, read, exported, imported again, and then continued
    by the model that it is of."""
    talk(tmp_path / "a", codec, ids)
    with Store.open(tmp_path / "a", ROW_IDENTITY) as store:
        data = export_session(store, here, "chat", None).session
        history = store.history("chat")
    root = tmp_path / "b"
    with Store.open(root, OTHER_TOKENIZER) as store:
        assert import_session(store, there, data, "local")["added"] == 3
        found = import_session(store, there, data, "local")
        assert (found["added"], found["session"]["title"]) == (0, "A girl")
        with pytest.raises(NotFound):
            store.session("chat")
        (info,) = store.foreign.listing("local", 10)
        assert info.tokenizer == found["session"]["tokenizer"] != ""
        now, digest = store.foreign.session_ids("chat")
        assert store.vocabularies.read(digest, "local").text(now) == words_of(codec).text(
            np.array(ids)
        )
        again = tower_file.read(export_foreign(store, "chat", None).session)
        assert again.text() == tower_file.read(data).text()
        assert again.source.name == "here.gguf"
        store.check_integrity(keys=True)
        assert store.verify().ok
    with Store.open(root, ROW_IDENTITY) as store:
        store.check_integrity(keys=True)
        np.testing.assert_array_equal(store.history("chat").stream, history.stream)
        assert store.recognise(np.array([*ids, 7], np.int32), "local") == "chat"
        store.vocabularies.keep(digest, words_of(codec))
        assert store.vocabularies.words(digest).hash == codec.vocabulary_hash


@pytest.mark.parametrize("form", [None, "text"])
def test_pictures_come_along(
    tmp_path: Path,
    codec: Codec,
    here: SessionModel,
    there: SessionModel,
    ids: list[int],
    form: str | None,
) -> None:
    """Of a session of another tokenizer, frozen or not, to where its model is served; and of one that is not frozen, by way of
    a store where it is not."""
    seen = [-(1 << 31), -5, -6]
    picture = SentMedium(medium_key(np.array(seen, np.int32)), b"picture!" * (1 << 18))
    with Store.open(tmp_path / "a", ROW_IDENTITY) as store:
        store.vocabularies.keep(store.state.identity.tokenizer_digest, words_of(codec))
        turn = turn_of([*ids[:9], *seen, *ids[9:]], [2], session="chat")
        store.commit_turn(replace(turn, media=[picture]))
        if form:
            freeze(store, Codec(codec.vocabulary, tables=store.tables), "chat", form=form)

    def exported(root: Path) -> bytes:
        with Store.open(root, OTHER_TOKENIZER) as store:
            export = export_foreign(store, "chat", None, with_media=True)
            (file,) = export.files
            data = store.media.read(file)
        assert data is not None
        assert export.n_bytes == len(export.session) + len(data)
        return export.session + data

    data = exported(tmp_path / "a")
    if not form:
        with Store.open(tmp_path / "b", OTHER_TOKENIZER) as store:
            assert import_session(store, there, data, "local")["media"]["kept"] == 1
        data = exported(tmp_path / "b")
    with Store.open(tmp_path / "c", ROW_IDENTITY) as store:
        found = import_session(store, here, data, "local")["media"]
        assert found == {"kept": 1, "damaged": 0, "not_kept": 0}
        row = store.media.session("chat", "local")
        assert row is not None
        assert store.media.file(row, picture.key) == picture.file
        store.disk.bytes_max = 2 << 20
        store.disk.make_room(0)
        found = import_session(store, here, data, "ann")
        assert (found["added"], found["media"]["not_kept"]) == (1, 1)


def test_a_text_takes_its_tokenizer(
    tmp_path: Path, codec: Codec, there: SessionModel, ids: list[int]
) -> None:
    """What only its tokenizer makes ids of is refused elsewhere, with the way to read it."""
    talk(tmp_path / "a", codec, ids)
    with Store.open(tmp_path / "a", ROW_IDENTITY) as store:
        freeze(store, Codec(codec.vocabulary, tables=store.tables), "chat", form="text")
    with Store.open(tmp_path / "a", OTHER_TOKENIZER) as store:
        data = export_foreign(store, "chat", None).session
        with pytest.raises(TowerFileError, match="or read it as text with towerctl read"):
            import_session(store, there, data, "guest")
        assert [info.scope for info in store.foreign.listing(None, 10)] == ["local"]


def test_files_that_lie_about_their_tokenizer(
    tmp_path: Path, codec: Codec, here: SessionModel, there: SessionModel, ids: list[int]
) -> None:
    """One that says that it is the served one, and one whose words contradict those that are known."""
    talk(tmp_path / "a", codec, ids)
    with Store.open(tmp_path / "a", ROW_IDENTITY) as store:
        honest = export_session(store, here, "chat", None).session
        with pytest.raises(InvalidRequest, match="says that its tokenizer is the served one"):
            import_session(store, there, honest, "guest")
    parsed = tower_file.read(honest)
    assert parsed.words is not None
    names = [name and b"<evil>" for name in codec.vocabulary.names]
    lie = replace(parsed, words=KeptVocabulary(codec.vocabulary.pieces, names))
    with Store.open(tmp_path / "b", OTHER_TOKENIZER) as store:
        import_session(store, there, honest, "local")
        with pytest.raises(InvalidRequest, match="not those that its tokenizer has here"):
            import_session(store, there, tower_file.write(lie), "local")
        assert [info.scope for info in store.foreign.listing(None, 10)] == ["local"]


def test_words_are_of_one_tenant(
    tmp_path: Path, codec: Codec, here: SessionModel, there: SessionModel, ids: list[int]
) -> None:
    """Nobody reads which tokens others' conversations have, or what they stand for there; once the
    whole vocabulary is kept, all read that."""
    talk(tmp_path / "a", codec, ids)
    with Store.open(tmp_path / "a", ROW_IDENTITY) as store:
        honest = export_session(store, here, "chat", None).session
    parsed = tower_file.read(honest)
    n = parsed.source.n_tokens
    turns = (PastTurn(None, 0, 0, n - 1, 1, 0, 1.0, 1.0, True),)
    every = History("probe", False, "", 1.0, 1.0, 0, turns, (), np.arange(n, dtype=np.int32))

    def all_ids(words: KeptVocabulary) -> bytes:
        return tower_file.write(replace(parsed, history=every, words=words))

    wordless, false = some_words(n, {}), some_words(n, dict.fromkeys(range(n), (b"XX", b"")))
    with Store.open(tmp_path / "b", OTHER_TOKENIZER) as store:
        import_session(store, there, all_ids(false), "first")
        import_session(store, there, honest, "alice")
        import_session(store, there, all_ids(wordless), "mallory")
        now, digest = store.foreign.session_ids("probe", "mallory")
        assert store.vocabularies.read(digest, "mallory").text(now) == ""
        assert tower_file.read(export_foreign(store, "probe", "mallory").session).text() == ""
        now, _ = store.foreign.session_ids("chat", "alice")
        said = words_of(codec).text(np.array(ids))
        assert store.vocabularies.read(digest, "alice").text(now) == said
        assert tower_file.read(export_foreign(store, "chat", None).session).text() == said
        with pytest.raises(StoreError, match="is not kept here"):
            store.vocabularies.read(digest)
        store.vocabularies.keep(digest, words_of(codec))
        assert store.vocabularies.read(digest, "first").text(now) == said
        assert not list(store.vocabularies.folder.glob(f"{digest.hex()}*.words"))


def test_words_grow_together(tmp_path: Path) -> None:
    """What two files know of one tokenizer; damage is an error and never another text."""
    with Store.open(tmp_path / "a", ROW_IDENTITY) as store:
        for known in ({0: (b"a", b"")}, {1: (b"", b"<s>"), 2: (b"c", b"")}):
            some = KnownWords(some_words(1 << 24, known), b"h" * 8, TokenizerIdentity("p"))
            store.vocabularies.add_words(b"d" * 32, "ann", some)
        assert store.vocabularies.read(b"d" * 32, "ann~x@1").text(np.array([1, 0, 2])) == "<s>ac"
        assert not store.vocabularies.has(b"d" * 32)
        (path,) = store.vocabularies.folder.iterdir()
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(StoreError, match="set aside"):
            store.vocabularies.read(b"d" * 32, "ann")
