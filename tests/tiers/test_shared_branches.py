"""Machines continue one session apart: whatever they push and pull, and in whatever order, each has all its turns in
the end, and where a person is in it changes only by what continues it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, check_rows, turn_of, write_all

from towerd.codec import Codec
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold.coding import SessionModel
from towerd.errors import NotFound, TokensLost
from towerd.models.bundled import bundled_model
from towerd.roaming.roaming import Roaming
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.shared.bucket import BucketError, open_bucket
from towerd.tiers.shared.objects import SessionRecord, decode_record
from towerd.tiers.shared.records import best_first
from towerd.tiers.shared.tier import SharedTier

SESSION, SCOPE = "chat", "local"
Said = tuple[tuple[int, ...], float]
"""A turn: its tokens, and when it was recorded."""


@dataclass
class Machine:
    """A daemon's store and its way to the bucket."""

    store: Store
    tier: SharedTier
    roaming: Roaming
    states: CheckpointTier | None = None

    def say(self, token: int, keep: int | None = None) -> None:
        """Another turn, after the current branch or, as an edit, after the first `keep` of its tokens."""
        before: list[int] = []
        with suppress(NotFound):
            before = self.store.session_ids(SESSION, SCOPE).tolist()
        prompt = [*before[:keep], token]
        self.store.commit_turn(turn_of([1, 2, *prompt[2:]], [token + 100, 7], session=SESSION))

    def push(self) -> dict[str, Any]:
        return asyncio.run(self.roaming.push_session(SESSION, SCOPE))

    def pull(self) -> dict[str, Any]:
        return asyncio.run(self.roaming.pull_session(SESSION, SCOPE))

    def turns(self) -> list[Said]:
        try:
            history = self.store.history(SESSION, SCOPE)
        except NotFound:
            return []
        return [
            (tuple(history.ids(place).tolist()), turn.created)
            for place, turn in enumerate(history.turns)
        ]

    def leaf(self) -> int | None:
        try:
            return self.store.session(SESSION, SCOPE).leaf
        except NotFound:
            return None

    def branch(self) -> set[int]:
        return {turn.id for turn in self.store.turns(SESSION, SCOPE) if turn.current}


@contextmanager
def machine(
    root: Path,
    bucket: Path,
    codec: Codec,
    identity: RowIdentity = ROW_IDENTITY,
    *,
    has_states: bool = False,
) -> Iterator[Machine]:
    """has_states: of a model that resumes from state checkpoints alone"""
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(root, identity))
        states = CheckpointTier(store, bytes_max=1 << 30, exact=False) if has_states else None
        if states is not None:
            stack.callback(states.close)
        tier = SharedTier(
            store,
            open_bucket(f"file://{bucket}"),
            bytes(32),
            "near",
            has_rows=not has_states,
            checkpoints=states,
        )
        words = KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)
        store.vocabularies.keep(store.state.identity.tokenizer_digest, words)
        model = SessionModel("model.gguf", "hash", codec)
        coding = SimpleNamespace(model=lambda: model)
        evictor = SimpleNamespace(least_valuable=lambda nbytes: [])
        roaming = Roaming(
            tier,
            cast(Any, SimpleNamespace(flush=lambda: None, evictor=evictor)),
            cast(Any, SimpleNamespace(store=store, coding=coding)),
        )
        yield Machine(store, tier, roaming, states)
        roaming.stop()
        asyncio.run(roaming.close())
        store.check_integrity(keys=True)


@pytest.fixture(scope="module")
def codec() -> Iterator[Codec]:
    with GgufVocabulary(bundled_model()) as vocabulary:
        yield Codec(vocabulary)


@pytest.fixture
def machines(tmp_path: Path, codec: Codec) -> Iterator[list[Machine]]:
    """Three of one model."""
    with ExitStack() as stack:
        bucket = tmp_path / "bucket"
        yield [stack.enter_context(machine(tmp_path / str(k), bucket, codec)) for k in range(3)]


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["say", "say", "edit", "push", "pull", "pull"]),
        st.integers(3, 9),
    ),
    max_size=14,
)


@given(STEPS)
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
def test_all_turns_come_together(
    tmp_path_factory: pytest.TempPathFactory, codec: Codec, steps: list[tuple[int, str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("machines")
    with ExitStack() as stack:
        all = [
            stack.enter_context(machine(folder / str(k), folder / "bucket", codec))
            for k in range(3)
        ]
        said: set[Said] = set()
        everyone = [(k, verb, 3) for verb in ("push", "push", "pull") for k in range(3)]
        for which, verb, token in [(0, "say", 3), *steps, *everyone]:
            at = all[which]
            before, leaf = at.turns(), at.leaf()
            if verb == "say":
                at.say(token)
            elif verb == "edit":
                at.say(token, keep=2 + token)
            elif verb == "pull":
                with suppress(NotFound):
                    at.pull()
                assert leaf is None or leaf in at.branch()
            elif before:
                at.push()
                assert at.turns() == before
            assert at.turns()[: len(before)] == before
            said |= set(at.turns())
        for at in all:
            assert len(at.turns()) == len(said)
            assert set(at.turns()) == said
            assert at.pull()["added"] == 0


def test_two_branches(machines: list[Machine]) -> None:
    """Two machines continue from one turn: each stays where it is and has the other's turn beside its own; a third
    gets both, and rows of either."""
    one, two, three = machines
    one.say(3)
    one.push()
    two.pull()
    one.say(4)
    two.say(5)
    two.say(6)
    for each in (one, two):
        node = each.store.match(each.store.session_ids(SESSION, SCOPE), SCOPE).nodes[-1]
        write_all(each.store, node)
    ours = one.store.session_ids(SESSION, SCOPE).tolist()
    theirs = two.store.session_ids(SESSION, SCOPE).tolist()
    for each in (one, two):
        assert not any(file.in_bucket for file in each.store.files())
        each.push()
        assert all(file.in_bucket for file in each.store.files())
    found = one.pull()
    assert (found["added"], found["branched"], found["tokens"]) == (2, True, len(ours))
    assert one.store.session_ids(SESSION, SCOPE).tolist() == ours
    found = three.pull()
    assert (found["added"], found["branched"], found["rows"]) == (4, False, len(theirs) - 1)
    assert three.store.session_ids(SESSION, SCOPE).tolist() == theirs
    match = three.store.match(np.array(theirs, np.int32), SCOPE)
    assert check_rows(three.store, match.nodes[-1]) == len(theirs) - 1
    found = two.pull()
    assert (found["added"], found["branched"], found["tokens"]) == (1, True, len(theirs))
    three.say(9)
    three.push()
    found = two.pull()
    assert (found["added"], found["branched"], found["tokens"]) == (1, False, len(theirs) + 3)
    assert one.pull()["branched"]
    assert one.store.session_ids(SESSION, SCOPE).tolist() == ours


def test_puts_at_the_same_time(
    machines: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two records that know nothing of one another are two heads: a pull takes the turns of both, and the next push
    makes them one. A damaged head costs its own turns."""
    one, two, three = machines
    one.say(3)
    two.say(4)
    with monkeypatch.context() as patch:
        for each in (one, two):
            patch.setattr(each.tier.bucket, "listing", lambda folder, most=0: [])
        one.push()
        two.push()
    (folder,) = (tmp_path / "bucket" / "sessions").iterdir()
    both = sorted(folder.iterdir())
    assert three.pull()["added"] == 2
    three.say(5)
    three.push()
    (union,) = {*folder.iterdir()} - {*both}
    assert [each.name[:6] for each in (*both, union)] == ["000001", "000001", "000003"]
    sound = [each.read_bytes() for each in both]
    for record in both:
        record.write_bytes(b"no record")
    assert one.pull()["added"] == 2
    union.write_bytes(b"no record")
    with pytest.raises(BucketError, match="cannot be used"):
        two.pull()
    both[0].write_bytes(sound[0])
    both[1].write_bytes(sound[1])
    assert two.pull()["added"] == 1


def test_another_tokenizer(tmp_path: Path, codec: Codec) -> None:
    """A copy that continued under another tokenizer is another session, beside this one."""
    bucket = tmp_path / "bucket"
    with GgufVocabulary(file.PATH) as vocabulary, ExitStack() as stack:
        other = Codec(vocabulary)
        one = stack.enter_context(machine(tmp_path / "one", bucket, codec))
        two = stack.enter_context(machine(tmp_path / "two", bucket, other, OTHER_TOKENIZER))
        one.say(3)
        one.push()
        assert two.pull()["session"]["tokenizer"]
        two.say(4)
        two.say(5)
        two.push()
        one.say(6)
        one.push()
        found = one.pull()
        assert (found["added"], found["session"]["tokenizer"]) == (0, "")
        assert len(one.turns()) == 2
        assert one.store.foreign.session(SESSION, SCOPE).info.n_turns == 2


def test_a_copy_without_new_turns_may_continue_what_is_current(machines: list[Machine]) -> None:
    """Whatever comes first: the turns, or that they continue the branch."""
    one, two, three = machines
    one.say(3)
    one.push()
    two.pull()
    three.pull()
    one.say(4)
    one.push()
    three.pull()
    three.say(8, keep=0)
    three.push()
    assert two.pull()["added"] == 2
    one.pull()
    one.push()
    assert two.pull()["added"] == 0
    assert two.store.session_ids(SESSION, SCOPE).tolist() == (
        one.store.session_ids(SESSION, SCOPE).tolist()
    )


def test_a_turn_that_lost_its_tokens_has_them_again(machines: list[Machine]) -> None:
    one, two, _ = machines
    one.say(3)
    one.say(4)
    one.push()
    before = one.turns()
    with one.store.locked(), one.store.state.catalog.transaction():
        one.store.state.catalog.run(  # as a repair leaves it where catalog and journal were damaged
            "UPDATE turns SET reply_node = NULL, tail = x'' WHERE id = (SELECT max(id) FROM turns)"
        )
    with pytest.raises(TokensLost):
        one.turns()
    one.pull()
    assert one.turns() == before
    one.push()
    two.pull()
    assert two.turns() == before


def test_a_record_names_the_checkpoints_of_those_before_it(tmp_path: Path, codec: Codec) -> None:
    """Of its branch, and of those beside it: each put names two more at most."""
    with machine(tmp_path / "one", tmp_path / "bucket", codec, has_states=True) as one:
        assert one.states is not None
        ends: list[int] = []
        for token, keep in ((3, None), (4, None), (5, None), (6, None), (7, 4)):
            one.say(token, keep)
            ids = one.store.session_ids(SESSION, SCOPE)
            ends.append(len(ids))
            one.store.insert(ids, SCOPE, [len(ids)])
            one.states.keep(ids, SCOPE, {len(ids): (np.full(9, token, np.uint8), False)})
            one.push()
        bucket = open_bucket(f"file://{tmp_path}/bucket")
        listed = best_first(bucket.listing("sessions"), one.tier.model_name(SCOPE))
        record = decode_record(one.tier.read_record(SCOPE, listed[0].place), SessionRecord)
        apart = [each for each in ends[:4] if each > 4]
        assert [each.position for each in record.other_checkpoints] == apart
        assert [each.position for each in record.checkpoints] == [
            *(each for each in ends[:4] if each <= 4),
            ends[4],
        ]
