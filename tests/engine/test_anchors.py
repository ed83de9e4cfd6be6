"""Anchors: the text around places where prompts diverged is found in the next prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.engine.anchors import (
    ANCHORS_MAX,
    APART_MIN,
    GRAM,
    POSITIONS_MAX,
    TENANTS_MAX,
    Anchors,
    WordStarts,
)
from towerd.store.tree.scope import scope_of
from towerd.tokens import Ids, common_prefix

END = 4
PIECES = [f"{'' if id < 100 else ' '}{id}".encode() for id in range(1000)]
"""Tokens below 100 continue a word."""
WORDS = WordStarts(PIECES, [END])


def text(n: int, seed: int) -> Ids:
    """Words of one token each."""
    return np.random.default_rng(seed).integers(100, 1000, n).astype(np.int32)


def joined(*parts: Ids | list[int]) -> Ids:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def learn(anchors: Anchors, prompt: Ids, tower: Ids, scope: str = "a") -> int:
    """Learn where a prompt leaves a tower, and return the place."""
    at = common_prefix(prompt, tower)
    anchors.learn(prompt, scope, at, tower[at : at + GRAM + 1])
    return at


def positions(anchors: Anchors, ids: Ids, start: int = 0, scope: str = "a") -> list[int]:
    return anchors.positions(ids, scope, start)


HEAD, REST, REMINDER = text(50, 1), text(80, 2), text(20, 3)


def test_a_date_behind_other_text_is_known_by_the_words_before_it() -> None:
    anchors = Anchors(WORDS)
    assert positions(anchors, HEAD) == []
    learn(anchors, joined(HEAD, [125], REST), joined(HEAD, [126], text(80, 9)))
    other = joined(text(30, 4), HEAD[20:], [127], text(40, 5))
    assert positions(anchors, other) == [60]
    assert positions(anchors, other, start=60) == [], "what is reused anyway"


def test_a_reminder_that_moves_is_known_by_how_it_begins() -> None:
    """What stood before it, and the token that joins it with that, are others each time."""
    anchors = Anchors(WORDS)
    first = joined(HEAD, text(40, 4), [501], REMINDER, [END])
    second = joined(HEAD, text(40, 4), [END], text(60, 5), [502], REMINDER, text(9, 6), [END])
    assert learn(anchors, second, first) == 90
    assert positions(anchors, second, start=90) == [151]
    third = joined(second[:151], [END], text(70, 7), [503], REMINDER)
    assert learn(anchors, third, second) == 151
    assert positions(anchors, third, start=151) == [222]


def test_the_end_of_a_list_that_grows_is_known_by_what_follows_it() -> None:
    anchors = Anchors(WORDS)
    tools = [text(30, 10 + i) for i in range(5)]
    learn(anchors, joined(HEAD, *tools[:4], REST), joined(HEAD, *tools[:3], REST))
    n = len(joined(HEAD, *tools))
    assert n in positions(anchors, joined(HEAD, *tools, REST))


@pytest.mark.parametrize("digits", [(1, 2), (1, 2, 3)])
def test_all_digits_of_a_word_are_one_place(digits: tuple[int, ...]) -> None:
    """Whichever of them changes, the beginning of the word is a place that the prompts share."""
    anchors = Anchors(WORDS)
    date = [300, *digits]
    learn(anchors, joined(HEAD, date, [7], REST), joined(HEAD, date, [8], text(80, 9)))
    for later in ([300, *digits, 9], [300, *digits[1:], 5, 9], [301, 5]):
        assert positions(anchors, joined(HEAD, later, text(80, 7))) == [50]
    assert WORDS.before(joined(HEAD, date, [7]), 52) == 50
    assert WORDS.before(joined(HEAD, date), len(HEAD) + len(date)) == 50
    assert WORDS.before(joined(HEAD, [END, *digits]), 52) == 51
    assert WORDS.before(joined(HEAD, [1] * 40), 85) == 85, "that is no word"
    assert WORDS.before(joined(HEAD, [-(1 << 30), 2, 3]), 52) == 51, "behind a picture"
    assert WORDS.before(joined([1, 2]), 0) == WORDS.before(joined([1, 2]), 1) - 1 == 0


def test_of_many_occurrences_the_first_and_the_last_count() -> None:
    """The header of a message stands everywhere; turns are dropped behind the first."""
    anchors = Anchors(WORDS)
    header = text(GRAM, 8)
    turns = [joined(text(40, 20 + i), header) for i in range(6)]
    learn(anchors, joined(HEAD, header, *turns[2:]), joined(HEAD, header, *turns))
    prompt = joined(text(70, 4), header, *turns, [100])
    assert sorted(positions(anchors, prompt)) == [70 + GRAM, len(prompt) - 1]


def test_what_was_seen_often_comes_first_and_stays() -> None:
    anchors = Anchors(WORDS)
    places = [text(GRAM, 100 + i) for i in range(POSITIONS_MAX + 2)]
    often = text(GRAM, 99)
    for i in range(2):
        learn(anchors, joined(often, [200 + i], REST), joined(often, [210 + i], text(80, 40 + i)))
    for i, place in enumerate(places):
        learn(anchors, joined(place, [200], REST), joined(place, [201], text(80, 50 + i)))
    prompt = joined(*(joined(text(30, 60 + i), place) for i, place in enumerate([often, *places])))
    found = positions(anchors, prompt)
    assert found[0] == 38
    assert len(found) == POSITIONS_MAX
    for i in range(ANCHORS_MAX):
        learn(anchors, joined(text(20, 1000 + i), [200]), joined(text(20, 1000 + i), [201]))
    assert positions(anchors, prompt) == [38]


def test_tenants_are_apart_and_bounded() -> None:
    anchors = Anchors(WORDS)
    prompt, tower = joined(HEAD, [125], REST), joined(HEAD, [126], REST)
    learn(anchors, prompt, tower)
    assert positions(anchors, prompt, scope="b") == []
    for i in range(TENANTS_MAX):
        learn(anchors, prompt, tower, scope=f"tenant {i}")
    assert positions(anchors, prompt) == []
    assert positions(anchors, prompt, scope="tenant 0")


def test_one_tenant_pushes_out_no_other_with_scales_of_its_adapters() -> None:
    anchors = Anchors(WORDS)
    prompt, tower = joined(HEAD, [125], REST), joined(HEAD, [126], REST)
    learn(anchors, prompt, tower)
    for i in range(TENANTS_MAX + 1):
        learn(anchors, prompt, tower, scope=scope_of("b", f"59ce0aab@{i}"))
    assert positions(anchors, prompt) == [50]
    assert positions(anchors, prompt, scope=scope_of("b", "59ce0aab@0.5")) == [50]


def test_nothing_is_learned_of_what_is_too_short() -> None:
    anchors = Anchors(WORDS)
    anchors.learn(HEAD, "a", GRAM - 1, HEAD[:GRAM])
    assert positions(anchors, HEAD) == []


@settings(deadline=None, max_examples=60)
@given(
    seeds=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    places=st.lists(st.integers(0, 300), max_size=12),
    start=st.integers(0, 300),
)
def test_positions_are_few_apart_and_at_words(
    seeds: list[int], places: list[int], start: int
) -> None:
    anchors = Anchors(WORDS)
    prompt = joined(*(text(25, seed) for seed in seeds))
    for at in places:
        anchors.learn(prompt, "a", min(at, len(prompt)), prompt[at // 2 :])
    found = positions(anchors, prompt, start)
    assert len(found) <= POSITIONS_MAX
    assert all(start < at <= len(prompt) and WORDS.before(prompt, at) == at for at in found)
    in_order = sorted(found)
    assert all(b - a >= APART_MIN for a, b in zip(in_order, in_order[1:], strict=False))
