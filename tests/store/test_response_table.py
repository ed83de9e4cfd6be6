"""Responses and conversations in the catalog: chains, deletions, tenants, what a deleted session takes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest
from crash import killed_after
from store_tools import ROW_IDENTITY, turn_of

from towerd.errors import DiskLimitReached, InvalidRequest, NotFound
from towerd.store import Store
from towerd.store.sessions.conversations import ContextItem, ResponseContext
from towerd.store.sessions.json_blob import pack, unpack
from towerd.store.sessions.responses import NewResponse

START = ResponseContext()
PACK = "towerd.store.sessions.responses.pack"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as opened:
        yield opened
        opened.check_integrity(keys=True)
        assert opened.verify().ok, opened.verify().problems


def item(name: str) -> ContextItem:
    return ContextItem(name, json.dumps({"id": name, "said": name * 300}).encode())


def names(items: list[bytes]) -> list[str]:
    return [json.loads(each)["id"] for each in items]


def keep(
    store: Store,
    name: str,
    context: ResponseContext = START,
    session: str = "",
    scope: str = "local",
) -> bool:
    """A response `name` to the item `q-name`, with the item `a-name`."""
    output = item(f"a-{name}")
    body = b'{"id": "%s", "output": [%s]}' % (name.encode(), output.body)
    new = NewResponse(scope, name, context, [item(f"q-{name}")], [output], body)
    return store.keep_response(new, session, scope)


def chain(store: Store, *all_names: str, session: str = "") -> None:
    before = ""
    for name in all_names:
        context = store.responses.context("local", before) if before else START
        assert keep(store, name, context, session)
        before = name


def rows_of(store: Store, table: str) -> int:
    return int(store.state.catalog.rows(f"SELECT count(*) FROM {table}")[0][0])


def test_a_chain_has_all_items_in_order(store: Store) -> None:
    """Of two that continue one response each has its own."""
    chain(store, "1", "2", "3")
    assert keep(store, "2b", store.responses.context("local", "1"))
    context = store.responses.context("local", "3")
    assert names(list(context.items)) == ["q-1", "a-1", "q-2", "a-2", "q-3", "a-3"]
    assert names(store.responses.input_items("local", "2b")) == ["q-1", "a-1", "q-2b"]
    assert json.loads(store.responses.body("local", "3"))["output"][0]["id"] == "a-3"


def test_a_client_that_sends_everything_has_its_items_kept_once(store: Store) -> None:
    """Whatever it leaves out of what it was answered; a deletion between changes nothing of the others."""
    store.commit_turn(turn_of([1, 2, 3], [4], session="work"))
    sent: list[ContextItem] = []
    given: list[ContextItem] = []
    for number in range(5):
        sent.append(item(f"q-{number}") if number % 2 else ContextItem(f"q-{number}", b"", False))
        output = item(f"a-{number}")
        body = b'{"id": "%d", "output": [%s]}' % (number, output.body)
        given = [named(each.name) if not each.is_named else each for each in sent]
        new = NewResponse("local", str(number), START, given, [output], body)
        assert store.keep_response(new, "work", "local")
        echoed = output.body if number % 2 else b'{"id": "a-%d", "said": "else"}' % number
        sent.append(ContextItem(f"a-{number}", echoed))
    store.responses.delete("local", "2")
    rows = store.state.catalog.rows("SELECT input FROM responses ORDER BY id")
    assert [unpack(blob).count(b'"id"') for (blob,) in rows] == [1, 2, 1, 2, 1]
    whole = [json.loads(each)["said"] for each in store.responses.input_items("local", "4")]
    assert whole == [json.loads(each.body)["said"] for each in given]


def named(name: str) -> ContextItem:
    """An item without an id of its client's, which gets another one each time."""
    id = f"{name}-{secrets.token_hex(4)}"
    return ContextItem(id, json.dumps({"id": id, "said": name * 300}).encode(), is_named=False)


@pytest.mark.parametrize("order", [*permutations("1234")])
def test_responses_go_in_any_order(store: Store, order: tuple[str, ...]) -> None:
    """What is left is whole."""
    chain(store, "1", "2", "3", "4")
    left = set(order)
    for name in order:
        store.responses.delete("local", name)
        left.remove(name)
        for other in left:
            n_items = 2 * int(other)
            assert len(store.responses.context("local", other).items) == n_items
        assert rows_of(store, "responses") == max(map(int, left), default=0)


def test_what_continues_a_deleted_response_keeps_its_words(store: Store) -> None:
    """And they go with the last one that does."""
    chain(store, "1", "2", "3")
    store.responses.delete("local", "1")
    for ask in (store.responses.body, store.responses.context, store.responses.delete):
        with pytest.raises(NotFound, match="'1' not found"):
            ask("local", "1")
    assert names(store.responses.input_items("local", "3"))[:2] == ["q-1", "a-1"]
    store.responses.delete("local", "2")
    assert rows_of(store, "responses") == 3
    store.responses.delete("local", "3")
    assert rows_of(store, "responses") == 0


@pytest.mark.parametrize("gone", ["response", "session"])
def test_of_a_deleted_response_that_is_continued_the_items_alone_stay(
    store: Store, gone: str
) -> None:
    """Nothing else of its object is in any file after the next gc."""
    for session, tokens in (("work", [1, 2, 3]), ("play", [7, 8, 9])):
        store.commit_turn(turn_of(tokens, [4], session=session))
    for name, session in (("1", "work"), ("2", "play")):
        output = ContextItem(f"a-{name}", b'{"id": "a-%s"}' % name.encode())
        body = b'{"instructions": "told-%s", "output": [%s]}' % (name.encode(), output.body)
        context = START if name == "1" else store.responses.context("local", "1")
        new = NewResponse("local", name, context, [item("q")], [output], body)
        assert store.keep_response(new, session, "local")
    before = store.responses.context("local", "2").items
    if gone == "session":
        store.delete_session("work")
    else:
        store.responses.delete("local", "1")
    assert store.responses.context("local", "2").items == before
    (body,) = store.state.catalog.rows("SELECT body FROM responses WHERE hidden = 1")[0]
    assert list(json.loads(unpack(body))) == ["output"]
    store.gc()
    root = store.state.directory.catalog.parent
    texts = [path.read_bytes() for path in (root / "catalog.sqlite", *(root / "journal").iterdir())]
    assert not any(b"told-1" in text for text in texts)
    assert any(b"told-2" in text for text in texts)


def test_a_session_that_was_made_anew_has_no_response_of_the_deleted_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if that happens before it is kept, nor meanwhile: the row of the session is the same again."""

    def made_anew() -> None:
        store.delete_session("work")
        store.commit_turn(turn_of([7, 8], [9], session="work"))

    store.commit_turn(turn_of([1, 2, 3], [4], session="work"))
    (pk,) = store.state.catalog.rows("SELECT pk FROM sessions")
    new = NewResponse("local", "1", START, [item("q")], [item("a")], b'{"id": "1", "output": []}')
    since = store.deletions.watch()
    made_anew()
    assert store.state.catalog.rows("SELECT pk FROM sessions") == [pk]
    assert not store.keep_response(new, "work", "local", since)

    def pack_late(data: bytes) -> bytes:
        made_anew()
        return pack(data)

    monkeypatch.setattr(PACK, pack_late)
    assert not store.keep_response(new, "work", "local")
    monkeypatch.undo()
    assert store.state.catalog.rows("SELECT pk FROM sessions") == [pk]
    assert rows_of(store, "responses") == 0
    assert store.keep_response(new, "work", "local")


def test_responses_are_compressed_without_the_lock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread takes the store's lock meanwhile."""
    store.commit_turn(turn_of([1, 2, 3], [4], session="work"))
    packed = []

    def pack_slowly(data: bytes) -> bytes:
        with ThreadPoolExecutor(1) as other:
            other.submit(store.sessions).result(timeout=10)
        packed.append(data)
        return pack(data)

    monkeypatch.setattr(PACK, pack_slowly)
    chain(store, "1", "2", session="work")
    assert len(packed) == 4


def test_a_branch_that_goes_leaves_the_trunk(store: Store) -> None:
    chain(store, "1", "2", "3")
    assert keep(store, "2b", store.responses.context("local", "1"))
    for name in ("1", "2b"):
        store.responses.delete("local", name)
    assert rows_of(store, "responses") == 3
    assert len(store.responses.context("local", "3").items) == 6


def test_tenants_are_apart(store: Store) -> None:
    assert keep(store, "1")
    made = store.responses.conversations.create("local", "{}", [item("i")])
    with pytest.raises(NotFound):
        store.responses.body("other", "1")
    with pytest.raises(NotFound):
        store.responses.conversations.delete("other", made.name)
    assert keep(store, "1", scope="other")
    foreign = store.responses.context("local", "1")
    assert not keep(store, "2", foreign, scope="other")


def test_a_deleted_session_takes_its_responses_and_conversations(store: Store) -> None:
    """Their words are in no file after the next gc, and what another session continues stays whole."""
    for session, tokens in (("work", [1, 2, 3]), ("play", [7, 8, 9])):
        store.commit_turn(turn_of(tokens, [4], session=session))
    made = store.responses.conversations.create("local", "{}", [])
    chain(store, "1", "2", session="work")
    context = store.responses.conversations.context("local", made.name)
    assert keep(store, "in", context, "work")
    assert keep(store, "3", store.responses.context("local", "2"), "play")
    store.delete_session("work")
    for name in ("1", "2", "in"):
        with pytest.raises(NotFound):
            store.responses.body("local", name)
    with pytest.raises(NotFound):
        store.responses.conversations.get("local", made.name)
    assert len(store.responses.context("local", "3").items) == 6
    assert not keep(store, "late", START, "work")
    store.delete_session("play")
    assert rows_of(store, "responses") == rows_of(store, "conversation_items") == 0
    store.gc()
    root = store.state.directory.catalog.parent
    for path in (root / "catalog.sqlite", *(root / "journal").iterdir()):
        assert b"q-1q-1" not in path.read_bytes()


def test_what_is_deleted_while_it_is_continued_is_not_brought_back(store: Store) -> None:
    chain(store, "1")
    context = store.responses.context("local", "1")
    store.responses.delete("local", "1")
    assert keep(store, "other")
    assert not keep(store, "2", context)


def test_a_conversation_grows_by_what_was_said_in_it(store: Store) -> None:
    """A response in it follows the items that were there, whatever is said or deleted later."""
    table = store.responses.conversations
    made = table.create("local", '{"topic":"sea"}', [item("i1"), item("i2")])
    assert (table.get("local", made.name).metadata) == '{"topic":"sea"}'
    assert keep(store, "1", table.context("local", made.name))
    assert keep(store, "2", table.context("local", made.name))
    everything = ["i1", "i2", "q-1", "a-1", "q-2", "a-2"]
    assert names(table.page("local", made.name, "", 9, oldest_first=True)[0]) == everything
    page, has_more = table.page("local", made.name, "q-2", 2, oldest_first=False)
    assert (names(page), has_more) == (["a-1", "q-1"], True)
    table.delete_item("local", made.name, "i2")
    with pytest.raises(NotFound, match="Item with id 'i2'"):
        table.item("local", made.name, "i2")
    follows = store.responses.context("local", "1")
    assert names(list(follows.items)) == ["i1", "q-1", "a-1"]
    assert keep(store, "3", follows)
    table.delete("local", made.name)
    assert store.responses.body("local", "1")
    for name, own in (("1", ["q-1"]), ("3", ["q-1", "a-1", "q-3"])):
        with pytest.raises(InvalidRequest, match="its conversation is deleted"):
            store.responses.context("local", name)
        assert names(store.responses.input_items("local", name)) == own


def test_items_of_one_id_in_a_conversation(store: Store) -> None:
    """What is the same is there once; what differs is there as well, under an id of its own."""
    table = store.responses.conversations
    made = table.create("local", "{}", [item("i"), item("i")])
    other = ContextItem("i", b'{"id": "i", "said": "else"}')
    with pytest.raises(InvalidRequest, match="id 'i' is in the conversation already"):
        table.add_items("local", made.name, [item("new"), other])
    with pytest.raises(InvalidRequest, match="id 'i'"):
        table.create("local", "{}", [item("i"), other])
    table.add_items("local", made.name, [item("i")])
    context = table.context("local", made.name)
    new = NewResponse("local", "1", context, [item("i"), other, other], [item("a")], b"")
    assert store.keep_response(new, "", "local")
    items, _ = table.page("local", made.name, "", 9, oldest_first=True)
    assert [json.loads(each)["said"] for each in items[1:]] == ["else", "a" * 300]
    assert [json.loads(table.item("local", made.name, name)) for name in names(items)] == [
        json.loads(each) for each in items
    ]


def test_everything_is_there_after_a_kill_and_from_the_journal_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"

    def talk() -> None:
        store = Store.open(root, ROW_IDENTITY)
        chain(store, "1", "2")
        made = store.responses.conversations.create("local", "{}", [item("i")])
        assert keep(store, "in", store.responses.conversations.context("local", made.name))

    killed_after(talk)
    for lost in ((), root.glob("catalog.sqlite*")):
        for path in lost:
            path.unlink()
        with Store.open(root, ROW_IDENTITY) as store:
            assert len(store.responses.context("local", "2").items) == 4
            assert names(store.responses.input_items("local", "in")) == ["i", "q-in"]
            assert store.verify().ok


def test_conversations_keep_to_the_disk_limit(store: Store) -> None:
    """Items are kept though no turn was: what is there stays readable."""
    conversations = store.responses.conversations
    made = conversations.create("local", "{}", [item("i")])
    store.disk.bytes_max = 1 << 10
    with pytest.raises(DiskLimitReached):
        conversations.add_items("local", made.name, [item("j")])
    with pytest.raises(DiskLimitReached):
        conversations.create("local", "{}", [])
    assert conversations.get("local", made.name) == made
