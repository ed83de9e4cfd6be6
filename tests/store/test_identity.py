"""Several models and several tokenizers in one store: what each sees, and what stays apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_tools import (
    OTHER_MODEL,
    OTHER_TOKENIZER,
    ROW_IDENTITY,
    check_rows,
    make_hot,
    turn_of,
    write_all,
)

from towerd.errors import NotFound, StoreError
from towerd.slots.row_identity import REPORTED_HASH_PREFIX
from towerd.store import Store
from towerd.store.catalog.identity import ModelIdentity
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.maintenance.space import stored_rows

IDS = list(range(100))


def talk(root: Path, name: str = "chat", model: ModelIdentity | None = None) -> None:
    with Store.open(root, model or ROW_IDENTITY) as store:
        store.commit_turn(turn_of(IDS[:90], IDS[90:], session=name))


def test_rows_of_two_models_lie_side_by_side(root: Path) -> None:
    """Each model finds its own; a split by one keeps the other's; gc takes both."""
    for model in (ROW_IDENTITY, OTHER_MODEL):
        with Store.open(root, model) as store:
            result = store.commit_turn(turn_of(IDS[:90], IDS[90:], session="chat"))
            write_all(store, result.node)
    with Store.open(root, ROW_IDENTITY) as store:
        store.insert(np.arange(37, dtype=np.int32), "local", [37])
        store.check_integrity(keys=True)
    with Store.open(root, OTHER_MODEL) as store:
        leaf = store.match(np.arange(99, dtype=np.int32), "local").nodes[-1]
        assert check_rows(store, leaf) == 99
        rows = stored_rows(store.state, store.turns("chat"))
        assert [(each.is_served, each.n_tokens) for each in rows] == [(True, 99), (False, 99)]
        store.delete_session("chat")
        store.gc()
        assert store.stats()["disk_bytes"] == 0
        assert not list((root / "segments").iterdir())
        assert store.verify().ok


def test_how_much_has_rows_is_told_of_the_current_branch(root: Path) -> None:
    """Whatever numbers splits gave to its segments."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of(IDS[:90], IDS[90:], session="x", n_cached=100))
        store.commit_turn(turn_of(IDS[:20], IDS[20:30], session="y", n_cached=30))
        store.commit_turn(turn_of(IDS[:90], IDS[90:], session="y", n_cached=100))
        make_hot(store, store.node(store.turns("x")[-1].reply_node))
        for name in "xy":
            assert [each.n_tokens for each in stored_rows(store.state, store.turns(name))] == [100]


def test_a_vocabulary_that_only_looks_alike_is_another(root: Path) -> None:
    """The same pieces cut by other rules; unknown rules are taken for those that are known."""
    talk(root, model=ModelIdentity(ROW_IDENTITY, "rules"))
    with Store.open(root, replace(ROW_IDENTITY, model_hash="third")) as store:
        assert [info.id for info in store.sessions()] == ["chat"]
    with Store.open(root, ModelIdentity(OTHER_MODEL, "others")) as store:
        assert store.sessions() == []
        assert [info.id for info in store.foreign.listing(None, 10)] == ["chat"]


def test_tokens_that_were_only_reported_are_one_models(root: Path) -> None:
    """Two servers report the same of vocabularies that were never read."""
    reported = [
        replace(ROW_IDENTITY, model_hash=f"{REPORTED_HASH_PREFIX}{n}", tokenizer="2") for n in "ab"
    ]
    with Store.open(root, reported[0]) as store:
        store.commit_turn(turn_of([1], [2], session="chat"))
    with Store.open(root, reported[1]) as store:
        assert store.sessions() == []


def test_sessions_of_one_name_under_two_tokenizers(root: Path) -> None:
    """The served one's is meant unless the other tokenizer is named."""
    with Store.open(root, OTHER_TOKENIZER) as store:
        store.commit_turn(turn_of([7, 8], [9], session="chat"))
        store.vocabularies.keep(
            store.state.identity.tokenizer_digest,
            KeptVocabulary([b"x"] * 7 + [b"", b"b", b"c"], [b""] * 7 + [b"<s>", b"", b""]),
        )
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        (foreign,) = store.foreign.listing("local", 10)
        ids, digest = store.foreign.session_ids("chat", None, foreign.tokenizer)
        assert store.vocabularies.read(digest).text(ids) == "<s>bc"
        with pytest.raises(NotFound):
            store.foreign.session("chat", "another tenant")
        with pytest.raises(NotFound):
            store.foreign.session("chat", None, "00")
        store.foreign.delete("chat", None, foreign.tokenizer)
        assert store.foreign.listing(None, 10) == []
        assert store.session_ids("chat").tolist() == IDS


def test_of_two_adapters_the_one_that_is_asked_for(root: Path) -> None:
    """Earlier releases made two sessions of one name."""
    scopes = ("alice", "alice~x@1")
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of([1, 2], [3], scope=scopes[1], session="work"))
        catalog = store.state.catalog
        with store.locked(), catalog.transaction():
            catalog.run(
                "INSERT INTO sessions(tokenizer, scope, id, named, created, updated)"
                " VALUES (?, 'alice', 'work', 1, 0, 1e12)",
                (store.state.identity.tokenizer,),
            )
        assert [store.session("work", scope).scope for scope in scopes] == list(scopes)
        store.delete_session("work", scopes[1])
        assert [info.scope for info in store.sessions()] == ["alice"]


def test_a_chat_continues_under_other_adapters(root: Path) -> None:
    """As the same session, found by its tokens; rows stay apart."""
    with Store.open(root, ROW_IDENTITY) as store:
        first = store.commit_turn(turn_of(IDS[:50], IDS[50:60], scope="alice"))
        assert store.recognise(np.array(IDS, np.int32), "alice~x@1") == first.session_id
        assert store.recognise(np.array(IDS, np.int32), "bob") is None
        again = store.commit_turn(turn_of(IDS[:90], IDS[90:], scope="alice~x@1"))
        assert (again.session_id, again.new_session) == (first.session_id, False)
        assert store.match(np.array(IDS, np.int32), "alice").n == 59
        assert len(store.turns(first.session_id)) == 2
        store.check_integrity(keys=True)


def test_a_tokenizer_that_the_catalog_lost_is_entered_again(root: Path) -> None:
    """What a repair of two damaged copies leaves; the store opens, now and later."""
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store, store.locked():
        catalog = store.state.catalog
        with catalog.transaction():
            catalog.run("UPDATE fingerprints SET tokenizer = NULL")
    for _ in range(2):
        with Store.open(root, ROW_IDENTITY) as store:
            assert store.session_ids("chat").tolist() == IDS


def test_damage_of_a_kept_vocabulary_is_set_aside(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        digest = store.state.identity.tokenizer_digest
        store.vocabularies.keep(digest, KeptVocabulary([b"a"], [b""]))
        (path,) = (root / "tokenizers").iterdir()
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(StoreError, match="set aside"):
            store.vocabularies.read(digest)
        assert not store.vocabularies.has(digest)
