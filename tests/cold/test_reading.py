"""Frozen conversations read as text: under another tokenizer, and under one that cuts text otherwise.

The oracle is the text of the ids that were recorded, from the vocabulary's pieces alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reworded import Reworded
from store_tools import ROW_IDENTITY, turn_of

from towerd.codec import Codec, container
from towerd.codec.codec import WrittenText
from towerd.cold import Coding, VocabularySource, freeze, thaw
from towerd.errors import SessionFrozen, StoreError, ThawError
from towerd.search.reading import TurnReader, text_of
from towerd.store import Store
from towerd.store.catalog.vocabularies import MEDIUM, KeptVocabulary

STORY = "Once upon a time there was a little girl who said: “hello, world” €5. ".encode()
FORMS = ("packed", "ranked", "text", "mix", "network")
OTHER = replace(ROW_IDENTITY, tokenizer="another")


@pytest.fixture
def root(tmp_path: Path, codec: Codec) -> Path:
    """A store with a session of each form, frozen, behind a prompt that a live session shares."""
    root = tmp_path / "store"
    with Store.open(root, ROW_IDENTITY) as store:
        words = KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)
        store.vocabularies.keep(store.state.identity.tokenizer_digest, words)
        base = [1, *map(int, codec.vocabulary.tokenize(STORY))]
        store.commit_turn(turn_of(base, [400], session="live"))
        for form in FORMS:
            store.commit_turn(turn_of(base, said(codec, form)[len(base) :], session=form))
            freeze(store, Codec(codec.vocabulary, tables=store.tables), form, form=form)
            frozen = store.cold.read(form)
            assert frozen is not None
            assert frozen.base.tolist() == base
    return root


def said(codec: Codec, form: str) -> list[int]:
    """With control tokens, bytes that are no text, and tokens that no tokenizer would write."""
    first, own = (
        [int(i) for i in codec.vocabulary.tokenize(each)] for each in (STORY, form.encode())
    )
    return [1, *first, *own, 2, 1, 5 + 0xE2, *first, 400, 401, 2]


def reader(store: Store) -> TurnReader:
    return TurnReader(store, Coding(lambda: VocabularySource(Path(), "")))


@pytest.mark.parametrize("form", FORMS)
def test_of_another_tokenizer(root: Path, codec: Codec, form: str) -> None:
    words = KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)
    with Store.open(root, OTHER) as store:
        with pytest.raises(SessionFrozen):
            store.foreign.session_ids(form)
        text = reader(store).foreign_text(form)
        assert text == words.text(np.array(said(codec, form)))
        assert text.startswith("<s> Once")
        assert text.endswith("</s>")
        assert store.foreign.session(form).info.cold_bytes > 0
        for path in store.vocabularies.folder.iterdir():
            path.unlink()
        with pytest.raises(StoreError, match="serve its model once"):
            reader(store).foreign_text(form)


@pytest.mark.parametrize("form", FORMS)
def test_cut_otherwise_than_it_was(root: Path, codec: Codec, form: str) -> None:
    """Its ids are an error that says so, its text is what it was."""
    words = KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)
    with Store.open(root, ROW_IDENTITY) as store:
        changed = Codec(Reworded(codec.vocabulary), tables=store.tables)
        frozen = store.cold.read(form)
        assert frozen is not None
        assert text_of(changed, frozen) == words.text(np.array(said(codec, form)))
        is_cut = form in ("text", "mix", "network")
        assert isinstance(changed.read(frozen.blob, frozen.base), WrittenText) == is_cut


def test_branches_and_media(tmp_path: Path, codec: Codec) -> None:
    """Where ids are had, the current branch alone; else every branch, in the order of writing. A
    damaged blob is an error."""
    ids = [1, *map(int, codec.vocabulary.tokenize(STORY))]
    medium = [-5, -6, -7]
    with Store.open(tmp_path / "store", ROW_IDENTITY) as store:
        store.commit_turn(turn_of(ids, [*medium, 400], session="x"))
        store.commit_turn(turn_of(ids, [401, 402], session="x"))
        for form in ("packed", "text"):
            freeze(store, codec, "x", form=form)
            frozen = store.cold.read("x")
            assert frozen is not None
            words = KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)
            text = text_of(Codec(words), frozen)
            if form == "packed":
                assert text == words.text(np.array([*ids, 401, 402]))
            else:
                assert text == words.text(np.array([*ids, 400, 401, 402])) + MEDIUM
            assert container.read(frozen.blob).n_ids == len(ids) + 6
            thaw(store, codec, "x")
        with pytest.raises(ThawError, match="thawed just now"):
            reader(store).text("x")
