"""Sessions carried from one store to another: the same turns, tokens, branches and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, ids_of, turn_of, write_all

from towerd.errors import InvalidRequest, NotFound
from towerd.store import History, Store

BASE = list(range(40, 60))

SHORT = st.lists(st.integers(0, 3), max_size=4)
STEPS = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99), SHORT, SHORT, st.floats(0, 1)),
    min_size=1,
    max_size=9,
)
"""(which earlier turn to continue, how much of it to keep, new prompt, reply, rows there)."""


def play(store: Store, steps: list[tuple[int, int, list[int], list[int], float]]) -> None:
    """A chat with edits and regenerations; every prompt continues some earlier turn."""
    said: list[list[int]] = [[9, 9]]
    for which, keep, more, reply, cached in steps:
        before = said[which % len(said)]
        prompt = before[: 2 + keep % (len(before) - 1)] + more
        whole = prompt + reply
        store.commit_turn(turn_of(prompt, reply, session="chat", n_cached=int(cached * len(whole))))
        said.append(whole)


def seen(store: Store, scope: str = "local") -> dict[str, Any]:
    """A session as far as two stores can agree on it, read in another way than a history is."""
    turns = store.turns("chat", scope)
    places = {turn.id: place for place, turn in enumerate(turns)}
    info = store.session("chat", scope)
    tails = dict(store.state.catalog.rows("SELECT id, tail FROM turns"))
    return {
        "ids": store.session_ids("chat", scope).tolist(),
        "info": (info.named, info.title, info.n_tokens, info.n_turns, info.created, info.updated),
        "leaf": places[info.leaf] if info.leaf else None,
        "turns": [
            (
                None if turn.parent is None else places[turn.parent],
                turn.n_prompt,
                turn.n_reply,
                turn.n_cached,
                turn.started,
                turn.created,
                turn.finished,
                turn.current,
                store.node(turn.reply_node).prefix_bytes() if turn.reply_node else b"",
                tails[turn.id],
                store.node(turn.prompt_node).p1 if turn.prompt_node else 0,
            )
            for turn in turns
        ],
    }


@given(STEPS, STEPS)
@settings(max_examples=12, deadline=None)
def test_a_history_is_the_session(tmp_path_factory: pytest.TempPathFactory, a: Any, b: Any) -> None:
    """Any branching session arrives whole in a store that holds tokens of another scope."""
    folder = tmp_path_factory.mktemp("stores")
    with (
        Store.open(folder / "a", ROW_IDENTITY) as one,
        Store.open(folder / "b", ROW_IDENTITY) as two,
    ):
        play(one, a)
        play(two, b)
        one.rename_session("chat", "a title")
        history = one.history("chat")
        assert two.add_history(history, "guest") == len(a)
        assert seen(two, "guest") == seen(one)
        two.check_integrity(keys=True)
        again = two.history("chat", "guest")
        assert [again.ids(k).tolist() for k in range(len(a))] == [
            history.ids(k).tolist() for k in range(len(a))
        ]
        assert two.add_history(history, "guest") == 0
        assert seen(two, "guest") == seen(one)


@pytest.fixture
def other(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "other", ROW_IDENTITY) as opened:
        yield opened


def test_a_chat_is_kept_once(store: Store) -> None:
    """The stream holds each turn's own tokens: a plain chat's whole length, once."""
    whole = [1, 2]
    for k in range(3, 40):
        store.commit_turn(turn_of(whole, [k], session="chat"))
        whole = [*whole, k]
    history = store.history("chat")
    assert history.stream.tolist() == whole
    assert history.ids(len(history.turns) - 1).tolist() == whole


def test_more_turns_are_added(store: Store, other: Store) -> None:
    """A later export brings what came since; an older one then changes nothing."""
    store.commit_turn(turn_of([1, 2], [3], session="chat"))
    early = store.history("chat")
    store.commit_turn(turn_of([1, 2, 3, 4], [5], session="chat"))
    late = store.history("chat")
    assert other.add_history(early, "local") == 1
    assert other.add_history(late, "local") == 1
    assert other.add_history(early, "local") == 0
    assert seen(other) == seen(store)


def test_a_session_that_differs_has_branches(store: Store, other: Store) -> None:
    """Turns that continue otherwise than here are added beside those here, which stay where they are."""
    store.commit_turn(turn_of([1, 2], [3], session="chat"))
    other.add_history(store.history("chat"), "local")
    for each, more in ((store, [8]), (other, [9])):
        each.commit_turn(turn_of([1, 2, 3, *more], [5], session="chat"))
    before = seen(other)
    assert other.add_history(store.history("chat"), "local") == 1
    after = seen(other)
    assert after["ids"] == before["ids"] == [1, 2, 3, 9, 5]
    assert after["turns"][:2] == before["turns"]
    assert after["turns"][2][0] == 0
    assert after["turns"][2][7] is False
    assert store.add_history(other.history("chat"), "local") == 1
    other.check_integrity(keys=True)
    other.commit_turn(turn_of([1, 2, 3, 9, 5, 6], [7], session="chat"))
    assert store.add_history(other.history("chat"), "local") == 1
    assert store.session_ids("chat").tolist() == [1, 2, 3, 8, 5]


def test_rows_that_are_there_are_used(store: Store, other: Store) -> None:
    """An imported session stands on a base that is precached here, and on its rows."""
    for each in (store, other):
        each.bases.add("bot", np.array(BASE, np.int32), "local", 2, public=True)
    write_all(other, other.node(other.bases.listing()[0].node))
    store.bases.add("other", ids_of(1, 2), "local", 0, public=True)
    store.commit_turn(turn_of([*BASE, 1], [2], session="chat"))
    history = store.history("chat")
    assert [(base.name, base.level, base.n_tokens) for base in history.bases] == [("bot", 2, 20)]
    other.add_history(history, "guest")
    (part,) = other.plan_rows(other.match(other.session_ids("chat", "guest"), "guest"), 0, 99)
    assert (part.p0, part.p1) == (0, 20)
    other.gc()
    assert other.session_ids("chat", "guest").tolist() == [*BASE, 1, 2]


def test_an_imported_session_is_recognised(store: Store, other: Store) -> None:
    """The next prompt of the chat finds it by its tokens, in its own scope only."""
    result = store.commit_turn(turn_of([1, 2, 3], [4, 5]))
    other.add_history(store.history(result.session_id), "local")
    after = other.commit_turn(turn_of([1, 2, 3, 4, 5, 6], [7]))
    assert (after.session_id, after.new_session) == (result.session_id, False)
    assert [turn.parent is None for turn in other.turns(after.session_id)] == [True, False]
    assert other.recognise(ids_of(1, 2, 3, 4, 5, 6), "guest") is None


def test_a_bad_name_is_refused(store: Store, other: Store) -> None:
    """Names come from files, too."""
    store.commit_turn(turn_of([1], [2], session="chat"))
    good = store.history("chat")
    bad = History(**{**vars(good), "id": "a\nb"})
    with pytest.raises(InvalidRequest, match="printable"):
        other.add_history(bad, "local")
    assert other.nodes() == []


def test_a_history_survives_a_restart(root: Path, tmp_path: Path) -> None:
    """What was added is durable, and a model with another tokenizer does not have it."""
    with Store.open(tmp_path / "from", ROW_IDENTITY) as store:
        play(store, [(0, 0, [1], [2, 3], 0.7), (0, 0, [1], [4], 0.7)])
        history, expected = store.history("chat"), seen(store)
        with pytest.raises(NotFound):
            store.history("none")
    with Store.open(root, ROW_IDENTITY) as store:
        store.add_history(history, "local")
    with Store.open(root, OTHER_TOKENIZER) as store:
        assert store.sessions() == []
    with Store.open(root, ROW_IDENTITY) as store:
        assert seen(store) == expected
        store.check_integrity(keys=True)
