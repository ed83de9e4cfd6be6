"""What `towerctl forget` chooses: sessions by tenant and age, what pins keep, and responses without sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_tools import ROW_IDENTITY, ids_of, turn_of

from towerd.store import Store
from towerd.store.maintenance.forget import Selection, forget_rest, rest_of, sessions_of, unpin
from towerd.store.sessions.conversations import ContextItem, ResponseContext
from towerd.store.sessions.responses import NewResponse

NOW, OLD = 1e9, 1e9 - 100 * 86400
BEFORE = NOW - 30 * 86400
A = [*range(40)]


class Clock:
    at = OLD

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY, clock=clock) as opened:
        yield opened
        opened.check_integrity()


def say(store: Store, session: str, ids: list[int], scope: str = "local") -> None:
    store.commit_turn(turn_of(ids[:-5], ids[-5:], session=session, scope=scope))


def pin(store: Store, session: str) -> int:
    node = store.turns(session)[-1].reply_node
    store.pins.add(node)
    return node


def chosen(store: Store, tenant: str | None = None, before: float | None = BEFORE) -> list[str]:
    return sorted(each.id for each in sessions_of(store.state, Selection(tenant, before)))


def test_by_age_and_tenant(store: Store, clock: Clock) -> None:
    say(store, "old", A)
    say(store, "other tenant", A, "bob")
    say(store, "with adapters", [*A, 7], "bob~adapter@1")
    clock.at = NOW
    say(store, "new", [*A, 1, 2, 3, 4, 5, 6])
    assert chosen(store) == ["old", "other tenant", "with adapters"]
    assert chosen(store, "local") == ["old"]
    assert chosen(store, "local", None) == ["new", "old"]
    assert chosen(store, "bo") == chosen(store, "bob~adapter@1") == []


def test_a_pin_keeps_a_session_also_when_it_continued(store: Store) -> None:
    say(store, "pinned", A)
    pin(store, "pinned")
    say(store, "pinned", [*A, *range(100, 110)])
    say(store, "of the same beginning", [*A[:20], *range(200, 220)])
    assert chosen(store) == ["of the same beginning"]
    assert chosen(store, "local", None) == ["of the same beginning", "pinned"]


def test_of_a_forgotten_session_its_own_pins_go(store: Store) -> None:
    """Not one that keeps another session, nor one at what others begin with."""
    say(store, "one", A)
    say(store, "two", [*A, *range(100, 110)])
    of_one, of_two = pin(store, "one"), pin(store, "two")
    sessions = {each.id: each for each in sessions_of(store.state, Selection(None, None))}
    unpin(store.state, sessions["one"])
    assert [node.id for node in store.pins.listing()] == [of_one, of_two]
    unpin(store.state, sessions["two"])
    assert [node.id for node in store.pins.listing()] == [of_one]
    store.delete_session("two")
    unpin(store.state, sessions["one"])
    assert store.pins.listing() == []


def respond(store: Store, name: str, after: ResponseContext, scope: str = "local") -> None:
    new = NewResponse(
        scope, name, after, [ContextItem("i" + name, b'{"id":"i"}')], [], b'{"output":[]}'
    )
    assert store.responses.add(new, None)


def test_old_responses_go_unless_a_new_one_continues_them(store: Store, clock: Clock) -> None:
    responses = store.responses
    respond(store, "old", ResponseContext())
    respond(store, "continued", ResponseContext())
    respond(store, "other tenant's", ResponseContext(), "bob")
    conversation = responses.conversations.create("local", "{}", [])
    clock.at = NOW
    respond(store, "new", responses.context("local", "continued"))
    selection = Selection(None, BEFORE)
    assert rest_of(store.state, selection) == {"conversations": 1, "responses": 2}
    assert rest_of(store.state, Selection("bob", BEFORE)) == {"conversations": 0, "responses": 1}
    assert forget_rest(store.state, store.bases, selection) == {"conversations": 1, "responses": 2}
    assert responses.body("local", "continued")
    assert responses.body("local", "new")
    for table, name in ((responses.body, "old"), (responses.conversations.get, conversation.name)):
        with pytest.raises(Exception, match="not found"):
            table("local", name)


def test_all_of_a_tenant(store: Store) -> None:
    for scope in ("local", "bob"):
        say(store, f"of {scope}", A, scope)
        node = store.turns(f"of {scope}", scope)[-1].reply_node
        store.pins.add(node)
        store.bases.add(f"base of {scope}", ids_of(*A[:9]), scope, 0, public=False)
        respond(store, f"response of {scope}", ResponseContext(), scope)
    found = forget_rest(store.state, store.bases, Selection("bob", None))
    assert {name: found[name] for name in ("responses", "bases", "pins")} == {
        "responses": 1,
        "bases": 1,
        "pins": 1,
    }
    assert [base.name for base in store.bases.listing()] == ["base of local"]
    assert [node.scope for node in store.pins.listing()] == ["local"]
    assert store.responses.body("local", "response of local")
    store.delete_session("of bob", "bob")
    store.gc()
    assert {node.scope for node in store.nodes()} == {"local"}
