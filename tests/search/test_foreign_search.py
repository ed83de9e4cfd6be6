"""Conversations of another tokenizer in the search, against what was said in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, turn_of
from waiting import until

from towerd.codec import Codec
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold.coding import Coding, SessionModel, VocabularySource
from towerd.models.bundled import bundled_model
from towerd.search.file import FILE_NAME
from towerd.search.index import SearchIndex
from towerd.search.search import Search
from towerd.store import Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.transfer import export_session, import_session

SAID = (b"the red otter", b" and a kilimanjaro")


def exported(root: Path) -> list[bytes]:
    """A conversation of the bundled model's tokenizer after its first and its second turn."""
    files = []
    with GgufVocabulary(bundled_model()) as vocabulary, Store.open(root, ROW_IDENTITY) as store:
        model = SessionModel("here.gguf", "hash", Codec(vocabulary))
        ids = [1]
        for text in SAID:
            prompt = [*ids, *map(int, vocabulary.tokenize(text))]
            store.commit_turn(turn_of(prompt, [300, 301], session="chat"))
            ids = [*prompt, 300, 301]
            files.append(export_session(store, model, "chat", None).session)
    return files


@contextmanager
def searched(store: Store, root: Path) -> Iterator[tuple[Search, SearchIndex]]:
    """The store's search, whose thread compares with the catalog as if no request ever ran."""
    index = SearchIndex(root / FILE_NAME)
    search = Search(store, Coding(lambda: VocabularySource(bundled_model(), "hash")), index)
    search.start(lambda: 100.0)
    try:
        yield search, index
    finally:
        search.close()


def is_found(search: Search, word: str) -> bool:
    return len(search.find(word, "local", 9)) == 1


def keep_own_vocabulary(store: Store, vocabulary: GgufVocabulary) -> None:
    words = KeptVocabulary(vocabulary.pieces, vocabulary.names)
    store.vocabularies.keep(store.state.identity.tokenizer_digest, words)


def test_what_is_imported_again_with_more_turns_is_found(tmp_path: Path) -> None:
    """As one passage, and turn by turn when its model is served."""
    root = tmp_path / "b"
    with GgufVocabulary(file.PATH) as vocabulary, Store.open(root, OTHER_TOKENIZER) as store:
        there = SessionModel("there.gguf", "other", Codec(vocabulary))
        with searched(store, root) as (search, _):
            for data, word in zip(exported(tmp_path / "a"), ("otter", "kilimanjaro"), strict=True):
                import_session(store, there, data, "local")
                search.changed()
                until(partial(is_found, search, word))
            assert len(search.find("otter kilimanjaro", "local", 9)) == 1
    with GgufVocabulary(bundled_model()) as vocabulary, Store.open(root, ROW_IDENTITY) as store:
        keep_own_vocabulary(store, vocabulary)
        with searched(store, root) as (search, index):
            key = search.reader.key(store.session("chat"))
            until(lambda: index.turns(key) == {turn.id for turn in store.turns("chat")})
            assert search.find("otter kilimanjaro", "local", 9) == []
            for word, turn in zip(("otter", "kilimanjaro"), store.turns("chat"), strict=True):
                ((hit, _),) = search.find(word, "local", 9)
                assert hit.turn == turn.id


def test_a_session_without_words_hides_no_other(tmp_path: Path) -> None:
    """Its tokenizer's vocabulary is not kept; those behind it are entered all the same."""
    with Store.open(tmp_path, OTHER_TOKENIZER) as store:
        store.commit_turn(turn_of([1, 5, 6], [7, 8], session="wordless"))
    with GgufVocabulary(bundled_model()) as vocabulary, Store.open(tmp_path, ROW_IDENTITY) as store:
        keep_own_vocabulary(store, vocabulary)
        prompt = [1, *map(int, vocabulary.tokenize(SAID[0]))]
        store.commit_turn(turn_of(prompt, [300, 301], session="mine"))
        with searched(store, tmp_path) as (search, _):
            until(partial(is_found, search, "otter"))


def test_a_name_that_is_used_again(tmp_path: Path) -> None:
    """Another process deleted the first session of the name: the second one is found by all its words."""
    with GgufVocabulary(bundled_model()) as vocabulary, Store.open(tmp_path, ROW_IDENTITY) as store:
        keep_own_vocabulary(store, vocabulary)
        turn = turn_of([1, *map(int, vocabulary.tokenize(SAID[0]))], [300, 301], session="chat")
        with searched(store, tmp_path) as (search, index):
            search.recorded(turn, store.commit_turn(turn))
            until(partial(is_found, search, "otter"))
            store.delete_session("chat")
            index.forget([key for key in index.keys() if key.id == "chat"])
            search.recorded(turn, store.commit_turn(turn))
            until(partial(is_found, search, "otter"))
