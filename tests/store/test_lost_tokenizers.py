"""The row of a tokenizer is lost in the catalog and in its journal: its conversations are not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, turn_of
from ten_sessions import DATABASE, N_SESSIONS, flip, log_of, populate, tokens

from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import freeze
from towerd.errors import StoreError, TokensLost
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.store.catalog.vocabularies import KeptVocabulary

IDS = [1, *range(300, 340)]


@pytest.fixture(scope="module")
def codec() -> Iterator[Codec]:
    with GgufVocabulary(bundled_model()) as vocabulary:
        yield Codec(vocabulary)


def words_of(codec: Codec) -> KeptVocabulary:
    return KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)


def lose(root: Path, *, models_too: bool) -> None:
    """Damage every copy of the row of ROW_IDENTITY's tokenizer, in the catalog and in the journal."""
    with closing(sqlite3.connect(root / DATABASE)) as db:
        ((pk, digest),) = db.execute(
            "SELECT id, digest FROM tokenizers WHERE pieces = ?", (ROW_IDENTITY.tokenizer,)
        ).fetchall()
        db.execute("UPDATE tokenizers SET created = created + 1 WHERE id = ?", (pk,))
        if models_too:
            db.execute("UPDATE fingerprints SET created = created + 1 WHERE tokenizer = ?", (pk,))
        db.commit()
    log = log_of(root)
    data, at = log.read_bytes(), -1
    assert digest in data
    while (at := data.find(digest, at + 1)) >= 0:
        flip(log, at)


def talk(root: Path, codec: Codec, *, keeps_words: bool, frozen: bool = False) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        store.commit_turn(turn_of(IDS[:30], IDS[30:], session="words"))
        if keeps_words:
            store.vocabularies.keep(store.state.identity.tokenizer_digest, words_of(codec))
        if frozen:
            freeze(store, codec, "words", form="packed")


@pytest.mark.parametrize("models_too", [False, True])
def test_it_is_found_again(
    root: Path, codec: Codec, models_too: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By a row identity of its model, or by its kept vocabulary, which segments prove; also while
    another model is served."""
    talk(root, codec, keeps_words=models_too)
    lose(root, models_too=models_too)
    with Store.open(root, OTHER_TOKENIZER) as store:
        assert len(store.foreign.listing(None, 100)) == 11
        ids, digest = store.foreign.session_ids("words")
        assert ids.tolist() == IDS
        if models_too:
            assert store.vocabularies.read(digest).text(ids).startswith("<s>")
    assert "rebuilt from its journal" in caplog.text
    assert "tokenizers" not in caplog.text.split("lost:")[-1]
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("words").tolist() == IDS
        for session in range(N_SESSIONS):
            assert store.session_ids(f"session-{session}").tolist() == tokens(session)
        store.check_integrity(keys=True)
        assert store.verify().ok


def test_until_it_is_found_its_conversations_are_listed(
    root: Path, codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing names it: it is said, its conversations are listed, no other model takes them for its
    own, and its own model has them back, however often the store is opened in between."""
    talk(root, codec, keeps_words=False)
    lose(root, models_too=True)
    for _ in range(2):
        with Store.open(root, OTHER_TOKENIZER) as store:
            assert store.sessions() == []
            assert len(store.foreign.listing(None, 100)) == 11
            with pytest.raises(StoreError, match="serve its model once"):
                store.vocabularies.read(store.foreign.session_ids("words")[1])
    assert "1 tokenizers, whose conversations are listed" in caplog.text
    for _ in range(2):
        with Store.open(root, ROW_IDENTITY) as store:
            assert store.session_ids("words").tolist() == IDS
            assert store.foreign.listing(None, 100) == []
            store.check_integrity(keys=True)
            assert store.verify().ok


def test_its_segments_are_checked_once_it_is_found(root: Path, codec: Codec) -> None:
    """Never other tokens: what is not what its key says is lost, and nothing else."""
    talk(root, codec, keeps_words=False)
    lose(root, models_too=True)
    with Store.open(root, OTHER_TOKENIZER) as store:
        catalog = store.state.catalog
        turns = store.foreign.session("words").turns
        with store.locked(), catalog.transaction():
            catalog.run(
                "UPDATE segments SET key = randomblob(32) WHERE id = ?", (turns[0].prompt_node,)
            )
    with Store.open(root, ROW_IDENTITY) as store:
        with pytest.raises(TokensLost):
            store.session_ids("words")
        for session in range(N_SESSIONS):
            assert store.session_ids(f"session-{session}").tolist() == tokens(session)
        problems = store.verify().problems
        assert problems
        assert all("'words' has no tokens" in problem for problem in problems)


def test_frozen_ones_are_read_by_their_vocabulary(root: Path, codec: Codec) -> None:
    """No segment is left whose key could prove anything; the blob says whose it is."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of(IDS[:30], IDS[30:], session="words"))
        store.vocabularies.keep(store.state.identity.tokenizer_digest, words_of(codec))
        other = KeptVocabulary([b"other"], [b""])
        store.vocabularies.keep(b"o" * 32, other)
        freeze(store, codec, "words", form="packed")
    lose(root, models_too=True)
    with Store.open(root, OTHER_TOKENIZER) as store:
        frozen, digest = store.foreign.frozen("words")
        vocabulary = store.vocabularies.read(digest)
        assert codec.decode(frozen.blob).tolist() == IDS
        assert vocabulary.pieces == codec.vocabulary.pieces
