"""Sessions: recognition, branches, listing, removal, bases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, ids_of, turn_of, write_all

from towerd.errors import InvalidRequest, NotFound
from towerd.store import Store

BASE = list(range(1000, 1020))


def test_a_turn_is_stored_exactly(store: Store) -> None:
    """The path ends at prompt end and n_cached; the rest is the tail."""
    result = store.commit_turn(turn_of([1, 2, 3], [4, 5, 6]))
    assert result.new_session
    assert [node.p1 for node in result.node.path()] == [3, 5]
    assert store.session_ids(result.session_id).tolist() == [1, 2, 3, 4, 5, 6]
    info = store.session(result.session_id)
    assert (info.n_tokens, info.n_turns, info.scope, info.named) == (6, 1, "local", False)
    (turn,) = store.turns(result.session_id)
    assert (turn.n_prompt, turn.n_reply, turn.n_cached, turn.parent) == (3, 3, 5, None)
    assert len(result.session_id) == 16
    int(result.session_id, 16)


@pytest.mark.parametrize("n_cached", [0, 1, 2, 3, 5, 6])
def test_any_number_of_cached_tokens(store: Store, n_cached: int) -> None:
    """A cancelled turn may have rows for a part of its prompt, or for nothing."""
    result = store.commit_turn(turn_of([1, 2, 3], [4, 5, 6], n_cached=n_cached))
    assert result.node.p1 == n_cached
    assert store.session_ids(result.session_id).tolist() == [1, 2, 3, 4, 5, 6]
    store.check_integrity(keys=True)
    assert store.verify().ok


def test_impossible_n_cached_is_refused(store: Store) -> None:
    """There cannot be more rows than tokens."""
    with pytest.raises(ValueError, match="n_cached"):
        store.commit_turn(turn_of([1], [2], n_cached=3))
    assert store.sessions() == []


def test_extending_a_chat_is_recognised(store: Store) -> None:
    """The next prompt contains the last reply; no id is needed."""
    first = store.commit_turn(turn_of([1, 2, 3], [4, 5, 6]))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.recognise(np.array(prompt, np.int32), "local") == first.session_id
    second = store.commit_turn(turn_of(prompt, [9, 10]))
    assert (second.session_id, second.new_session) == (first.session_id, False)
    turns = store.turns(first.session_id)
    assert [turn.parent for turn in turns] == [None, turns[0].id]
    assert [turn.current for turn in turns] == [True, True]
    assert store.session_ids(first.session_id).tolist() == [*prompt, 9, 10]


def test_a_reply_rendered_anew_still_continues(store: Store) -> None:
    """Templates may tokenize the reply differently; the prompt end is enough."""
    first = store.commit_turn(turn_of([1, 2, 3], [4, 5, 6]))
    second = store.commit_turn(turn_of([1, 2, 3, 44, 6, 7], [8]))
    assert second.session_id == first.session_id
    assert store.turns(first.session_id)[1].parent == first.turn_id


def test_regeneration_is_a_sibling(store: Store) -> None:
    """The same prompt again: same session, same parent, the leaf moves, the old turn stays."""
    first = store.commit_turn(turn_of([1, 2], [3, 4]))
    second = store.commit_turn(turn_of([1, 2, 3, 4, 5], [6, 7]))
    third = store.commit_turn(turn_of([1, 2, 3, 4, 5], [8, 9]))
    assert first.session_id == second.session_id == third.session_id
    turns = store.turns(first.session_id)
    assert [turn.parent for turn in turns] == [None, first.turn_id, first.turn_id]
    assert [turn.current for turn in turns] == [True, False, True]
    assert store.session_ids(first.session_id).tolist() == [1, 2, 3, 4, 5, 8, 9]
    same = store.commit_turn(turn_of([1, 2, 3, 4, 5], [8, 9]))
    assert same.node is third.node


def test_editing_a_later_message_branches(store: Store) -> None:
    """History up to an earlier reply, then other tokens: the same session branches there."""
    first = store.commit_turn(turn_of([1, 2], [3, 4]))
    store.commit_turn(turn_of([1, 2, 3, 4, 5, 6], [7]))
    edit = store.commit_turn(turn_of([1, 2, 3, 4, 5, 66], [8]))
    assert edit.session_id == first.session_id
    assert store.turns(first.session_id)[2].parent == first.turn_id
    assert store.session_ids(first.session_id).tolist() == [1, 2, 3, 4, 5, 66, 8]


def test_two_chats_on_one_base_are_two_sessions(store: Store) -> None:
    """A shared beginning that is no turn's end joins nothing, but is stored once."""
    store.bases.add("bot", np.array(BASE, np.int32), "local", 2, public=True)
    one = store.commit_turn(turn_of([*BASE, 1, 2], [3, 4]))
    two = store.commit_turn(turn_of([*BASE, 5, 6], [7, 8]))
    assert one.session_id != two.session_id
    assert one.node.path()[0] is two.node.path()[0]
    again = store.commit_turn(turn_of([*BASE, 1, 2, 3, 4, 9], [9]))
    assert again.session_id == one.session_id
    assert [info.id for info in store.sessions()] == [one.session_id, two.session_id]


def test_named_sessions_are_kept_by_scope(store: Store) -> None:
    """The client's name wins over recognition, and tenants do not share names."""
    first = store.commit_turn(turn_of([1, 2], [3], session="chat"))
    assert (first.session_id, first.new_session) == ("chat", True)
    other = store.commit_turn(turn_of([8, 9], [3], session="chat", scope="bob"))
    assert other.new_session
    far = store.commit_turn(turn_of([50, 51], [52], session="chat"))
    assert (far.session_id, far.new_session) == ("chat", False)
    assert store.turns("chat", "local")[1].parent is None
    with pytest.raises(InvalidRequest, match="bob, local"):
        store.session("chat")
    assert store.session_ids("chat", "bob").tolist() == [8, 9, 3]
    assert [info.scope for info in store.sessions("bob")] == ["bob"]
    assert store.session("chat", "local").n_turns == 2


def test_recognition_stays_in_its_scope(store: Store) -> None:
    """The same tokens from another tenant are another session, even on public nodes."""
    store.insert(ids_of(1, 2, 3), "public", [3])
    one = store.commit_turn(turn_of([1, 2, 3], [4], scope="a"))
    two = store.commit_turn(turn_of([1, 2, 3], [4], scope="b"))
    assert one.session_id != two.session_id
    assert store.commit_turn(turn_of([1, 2, 3], [5], scope="a")).session_id == one.session_id


def test_recognition_survives_a_later_public_base(store: Store) -> None:
    """Tokens that a tenant stored before they became public are still its session."""
    one = store.commit_turn(turn_of([1, 2, 3], [4, 5], scope="a"))
    store.insert(np.arange(1, 12, dtype=np.int32), "public", [11])
    prompt = np.arange(1, 10, dtype=np.int32)
    assert store.match(prompt, "a").n == 9
    assert store.recognise(prompt, "a") == one.session_id
    assert store.recognise(prompt, "b") is None


def test_the_session_used_last_wins_a_tie(store: Store) -> None:
    """Two named chats with the same beginning, continued without a name."""
    now = [10.0]
    store.state.clock = lambda: now[0]
    for name in ("one", "two"):
        now[0] += 1
        store.commit_turn(turn_of([1, 2], [3, 4], session=name))
    assert store.recognise(ids_of(1, 2, 3, 4, 5), "local") == "two"
    now[0] += 1
    store.commit_turn(turn_of([1, 2, 3, 4, 5], [6], session="one"))
    assert store.recognise(ids_of(1, 2, 3, 4, 7), "local") == "one"


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\0"])
def test_impossible_names_are_refused(store: Store, name: str) -> None:
    """Names are shown to people and sent in headers."""
    with pytest.raises(InvalidRequest, match="printable"):
        store.commit_turn(turn_of([1], [2], session=name))
    assert store.nodes() == []
    store.check_integrity()


def test_rename_delete_and_gc(store: Store) -> None:
    """A deleted session frees the segments that nothing else needs."""
    store.bases.add("bot", np.array(BASE, np.int32), "local", 2, public=False)
    one = store.commit_turn(turn_of([*BASE, 1, 2], [3, 4]))
    two = store.commit_turn(turn_of([*BASE, 5, 6], [7, 8]))
    for result in (one, two):
        write_all(store, result.node)
    assert store.rename_session(one.session_id, "talk").title == "talk"
    with pytest.raises(InvalidRequest):
        store.rename_session(one.session_id, "x" * 501)
    assert store.gc().segments == 0
    two_file = two.node.file
    store.delete_session(two.session_id)
    report = store.gc()
    assert two_file is not None
    assert (report.segments, report.files, report.bytes_freed) == (2, 1, two_file.nbytes)
    with pytest.raises(NotFound):
        store.session_ids(two.session_id)
    store.delete_session(one.session_id)
    store.gc()
    assert [node.p1 for node in store.nodes()] == [len(BASE)]
    store.bases.remove("bot", "local")
    store.gc()
    assert store.nodes() == []
    assert store.state.warm_bytes == 0
    assert store.state.directory.names() == set()
    store.check_integrity(keys=True)


def test_a_freed_history_takes_no_disk(store: Store) -> None:
    """The tokens of a deleted session leave the catalog's file; what is left is still there."""
    kept = store.commit_turn(turn_of([1, 2, 3], [4]))
    before = store.stats()["catalog_bytes"]
    long = store.commit_turn(turn_of(list(range(2_000_000)), [4]))
    grown = store.stats()["catalog_bytes"]
    assert grown > before + 8_000_000
    store.delete_session(long.session_id)
    store.gc(dry_run=True)
    assert store.stats()["catalog_bytes"] >= grown
    store.gc()
    assert store.stats()["catalog_bytes"] < before + 1_000_000
    assert store.session_ids(kept.session_id).tolist() == [1, 2, 3, 4]
    store.check_integrity(keys=True)


def test_ids_of_removed_segments_are_not_used_again(root: Path) -> None:
    """A tier that still holds an old id must not meet a new segment under it."""
    with Store.open(root, ROW_IDENTITY) as store:
        old = store.insert(ids_of(1), "local", [1])[0].id
        store.gc()
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.insert(ids_of(2), "local", [1])[0].id > old


def test_bases_are_idempotent_and_move(store: Store) -> None:
    """Precaching again does nothing; a changed prompt moves name and pin."""
    platform = store.bases.add("platform", np.array(BASE[:8], np.int32), "local", 0, public=True)
    bot = store.bases.add("bot", np.array(BASE, np.int32), "local", 2, public=True)
    assert bot == store.bases.add("bot", np.array(BASE, np.int32), "local", 2, public=True)
    assert store.bases.listing() == [platform, bot]
    old = store.node(bot.node)
    assert [node.p1 for node in old.path()] == [8, 20]
    store.check_integrity()
    new = store.bases.add("bot", ids_of(*BASE[:10], 7), "local", 2, public=True)
    assert new.digest != bot.digest
    assert not old.pinned
    assert store.node(new.node).pinned
    store.check_integrity()
    store.gc()
    assert old.removed
    with pytest.raises(NotFound):
        store.bases.remove("none", "public")


def test_sessions_belong_to_one_tokenizer(root: Path) -> None:
    """Another tokenizer's ids mean other text, so its sessions are not shown."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of([1], [2], session="chat"))
        store.bases.add("b", ids_of(1), "local", 0, public=False)
    with Store.open(root, OTHER_TOKENIZER) as store:
        assert store.sessions() == []
        assert store.bases.listing() == []
        assert store.commit_turn(turn_of([1], [2], session="chat")).new_session
        store.gc()
    with Store.open(root, ROW_IDENTITY) as store:
        assert len(store.nodes()) == 1
        assert store.session_ids("chat").tolist() == [1, 2]
        assert store.node(store.bases.listing()[0].node).pinned
        store.check_integrity(keys=True)
