"""Turns, branches, freezing, thawing and removing at random, against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_tools import ROW_IDENTITY, check_rows, turn_of, write_all

from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import cold_history, freeze, thaw, write_copy
from towerd.errors import SessionFrozen
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.store.sessions.cold import START
from towerd.store.sessions.sessions import RECOGNISED_TOKENS_MIN
from towerd.tiers.ranking import Ranking
from towerd.tokens import ids_bytes

BASE = list(range(100, 140))
"""Long enough to be a blob's context."""
WORDS = st.lists(st.integers(3, 6), min_size=1, max_size=6)
SCOPES = ("a", "b")


@dataclass
class Chat:
    """What is known of one session."""

    scope: str
    said: list[tuple[int, ...]] = field(default_factory=list)
    """Prompt and reply of every turn."""
    ends: list[tuple[int, ...]] = field(default_factory=list)
    updated: float = 0.0
    is_frozen: bool = False
    has_copy: bool = False


@pytest.fixture(scope="module", autouse=True)
def codec() -> Iterator[Codec]:
    with GgufVocabulary(bundled_model()) as vocabulary:
        ColdMachine.codec = Codec(vocabulary)
        yield ColdMachine.codec


class ColdMachine(RuleBasedStateMachine):
    """The dictionary knows whole sequences; the store must agree, frozen or not."""

    codec: Codec

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="cold-machine-"))
        self.now = 0.0
        self.chats: dict[str, Chat] = {}

    @initialize(is_pinned=st.booleans())
    def open(self, is_pinned: bool) -> None:
        self.open_store()
        if is_pinned:
            self.store.bases.add("base", np.array(BASE, np.int32), "a", 0, True)

    def open_store(self) -> None:
        self.store = Store.open(self.root, ROW_IDENTITY, clock=self.clock)
        self.ranking = Ranking("foresight", self.store, self.clock)
        self.store.listen(self.ranking)
        self.ranking.found(self.store.nodes())

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def clock(self) -> float:
        self.now += 1
        return self.now

    def pick(self, data: st.DataObject, *, frozen: bool | None = None) -> str:
        keys = [k for k, chat in self.chats.items() if frozen in (None, chat.is_frozen)]
        keys.sort(key=lambda key: (self.chats[key].said, key))
        return data.draw(st.sampled_from(keys))

    @rule(
        data=st.data(),
        more=WORDS,
        reply=WORDS,
        scope=st.sampled_from(SCOPES),
        name=st.sampled_from((None, None, "x", "y")),
        start=st.booleans(),
        cached=st.sampled_from((1.0, 0.9, 0.5, 0.0)),
    )
    def turn(
        self,
        data: st.DataObject,
        more: list[int],
        reply: list[int],
        scope: str,
        name: str | None,
        start: bool,
        cached: float,
    ) -> None:
        """As a request does it: the session it continues is thawed, then the turn is recorded."""
        prompt = BASE[: data.draw(st.sampled_from((40, 33, 0)))] + more
        if self.chats and not start:
            before = data.draw(st.sampled_from(self.chats[self.pick(data)].said))
            prompt = [*before[: data.draw(st.integers(1, len(before)))], *more]
        whole = (*prompt, *reply)
        n_cached = int(cached * len(whole))
        expected = f"{scope}/{name}" if name else self.recognised(tuple(prompt), scope)
        if name is not None:
            frozen = self.store.cold.named(name, scope)
        else:
            frozen = self.store.cold.continued_by(ids_bytes(np.array(prompt, np.int32)), scope)
        if frozen is not None:
            key = f"{scope}/{frozen}"
            assert self.chats[key].is_frozen
            assert key == expected
            assert thaw(self.store, self.codec, frozen, scope)
            self.chats[key].is_frozen, self.chats[key].has_copy = False, True
        result = self.store.commit_turn(
            turn_of(prompt, reply, scope=scope, session=name, n_cached=n_cached)
        )
        with self.store.locked():
            nbytes = self.store.bytes_of
            self.ranking.visited(result.node.path(), self.now, nbytes, nbytes)
        key = f"{scope}/{result.session_id}"
        assert result.new_session == (key not in self.chats)
        assert key == expected if expected in self.chats or name else result.new_session
        chat = self.chats.setdefault(key, Chat(scope))
        assert not chat.is_frozen
        chat.said.append(whole)
        chat.ends += [whole[: min(len(prompt), n_cached)], whole[:n_cached]]
        chat.updated, chat.has_copy = self.now, False

    def recognised(self, prompt: tuple[int, ...], scope: str) -> str | None:
        """The session of the deepest turn end that begins `prompt`, the last used of several."""
        found = [
            (len(end), chat.updated, key)
            for key, chat in self.chats.items()
            for end in chat.ends
            if chat.scope == scope
            and len(end) >= RECOGNISED_TOKENS_MIN
            and prompt[: len(end)] == end
        ]
        return max(found)[2] if found else None

    @precondition(lambda self: any(not chat.is_frozen for chat in self.chats.values()))
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        """Everything that is listed stays, and ids are nowhere but in blobs and in what is shared."""
        key = self.pick(data, frozen=False)
        scope, id = key.split("/")
        before, info = self.turns(key), self.store.session(id, scope)
        others = {k: self.ids(k) for k in self.chats if k != key}
        form = "auto" if self.chats[key].has_copy else "packed"
        froze = freeze(self.store, self.codec, id, scope, form=form)
        assert froze is not None
        assert self.turns(key) == before
        after = self.store.session(id, scope)
        assert after.cold_bytes == froze.nbytes > info.cold_bytes
        assert (after.updated, after.title, after.n_turns) == (info.updated, "", info.n_turns)
        assert {k: self.ids(k) for k in others} == others
        self.chats[key].is_frozen = True
        self.chats[key].has_copy = False

    @precondition(lambda self: any(not chat.is_frozen for chat in self.chats.values()))
    @rule(data=st.data())
    def write_copy(self, data: st.DataObject) -> None:
        """Nothing else changes; freezing then takes the copy, however the tree has grown since."""
        key = self.pick(data, frozen=False)
        scope, id = key.split("/")
        wrote = write_copy(self.store, self.codec, id, scope, form="packed")
        assert wrote == (not self.chats[key].has_copy)
        self.chats[key].has_copy = True

    @precondition(lambda self: any(chat.is_frozen for chat in self.chats.values()))
    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        scope, id = self.pick(data, frozen=True).split("/")
        assert thaw(self.store, self.codec, id, scope)
        assert not thaw(self.store, self.codec, id, scope)
        self.chats[f"{scope}/{id}"].is_frozen = False
        self.chats[f"{scope}/{id}"].has_copy = True

    @precondition(lambda self: self.chats)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = self.pick(data)
        scope, id = key.split("/")
        self.store.delete_session(id, scope)
        del self.chats[key]

    @precondition(lambda self: any(not chat.is_frozen for chat in self.chats.values()))
    @rule(data=st.data())
    def write_rows(self, data: st.DataObject) -> None:
        scope, id = self.pick(data, frozen=False).split("/")
        node_id = self.store.turns(id, scope)[-1].reply_node
        if node_id:
            node = self.store.node(node_id)
            if all(each.file is None and each.scope == scope for each in node.path()):
                write_all(self.store, node)

    @rule()
    def collect(self) -> None:
        self.store.gc()

    @rule(loses_catalog=st.booleans())
    def reopen(self, loses_catalog: bool) -> None:
        self.store.close()
        if loses_catalog:
            (self.root / "catalog.sqlite").unlink()
        self.open_store()
        report = self.store.verify()
        assert report.ok, report.problems
        assert report.frozen_sessions == sum(chat.is_frozen for chat in self.chats.values())

    def turns(self, key: str) -> list[tuple[Any, ...]]:
        scope, id = key.split("/")
        return [
            (turn.id, turn.parent, turn.n_prompt, turn.n_reply, turn.n_cached, turn.current)
            for turn in self.store.turns(id, scope)
        ]

    def ids(self, key: str) -> tuple[int, ...]:
        """The tokens of the current branch."""
        scope, id = key.split("/")
        if not self.chats[key].is_frozen:
            return tuple(self.store.session_ids(id, scope).tolist())
        history = cold_history(self.store, self.codec, id, scope)
        assert history is not None
        assert [tuple(history.ids(n).tolist()) for n in range(len(history.turns))] == (
            self.chats[key].said
        )
        with pytest.raises(SessionFrozen):
            self.store.session_ids(id, scope)
        return tuple(history.ids(history.leaf).tolist())

    @invariant()
    def agrees(self) -> None:
        self.store.check_integrity(keys=True)
        self.ranking.check_integrity()
        assert {f"{each.scope}/{each.id}" for each in self.store.sessions()} == self.chats.keys()
        idle = self.store.cold.page(self.now + 1, START, 100, lambda node: node.has_rows)
        copies = {f"{each.scope}/{each.id}": each.has_copy for each in idle}
        warm = {key: chat for key, chat in self.chats.items() if not chat.is_frozen}
        assert copies == {key: chat.has_copy for key, chat in warm.items()}
        for key, chat in self.chats.items():
            assert self.ids(key) == chat.said[-1]
            if not chat.is_frozen:
                scope, id = key.split("/")
                found = self.store.history(id, scope)
                assert [tuple(found.ids(n).tolist()) for n in range(len(found.turns))] == chat.said
        for node in self.store.nodes():
            check_rows(self.store, node)


ColdMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestColdMachine = ColdMachine.TestCase
