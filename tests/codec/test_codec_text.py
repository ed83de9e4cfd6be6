"""Ids to text and back: what tokenizers do to text must not show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from towerd.codec.errors import CodecError
from towerd.codec.text import MARK_FIRST, Patch, Text, from_ids, parse, to_ids
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model

HARD = (
    "",
    " " * 64,
    "a" + " " * 64 + "b\r\n\r\n\tc",
    "nul \0 in the middle\0",
    "<|im_start|>user\n<s>[INST] <|eot_id|> not special </s><unk><0x41>",
    "한국어 中文 😀👩‍👩‍👧 e\u0301 \u202eright to left",
    " leading",
    "  two",
    "\n",
    "▁",
    " ▁ ",
    "\u00a0\u2028",
    "x" * 3000,
)


def there_and_back(ids: list[int], vocabulary: GgufVocabulary) -> Text:
    text = from_ids(np.array(ids, np.int32), vocabulary)
    again = parse(text.text, text.side())
    assert again == text
    assert to_ids(again, vocabulary) == ids
    return text


@pytest.mark.parametrize("hard", HARD, ids=range(len(HARD)))
def test_hard_text(hard: str, vocabulary: GgufVocabulary) -> None:
    """What a tokenizer makes of a text comes back, and needs at most an exception at its start."""
    text = there_and_back(vocabulary.tokenize(hard.encode()).tolist(), vocabulary)
    assert len(text.exceptions) <= 1


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_ids(vocabulary: GgufVocabulary, data: st.DataObject) -> None:
    """Arbitrary ids: no tokenizer would write them, and they come back."""
    token = st.integers(0, vocabulary.n_tokens - 1)
    there_and_back(data.draw(st.lists(token, max_size=60)), vocabulary)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_text_between_control_tokens(vocabulary: GgufVocabulary, data: st.DataObject) -> None:
    controls = [i for i, piece in enumerate(vocabulary.pieces) if not piece]
    ids: list[int] = []
    for text in data.draw(st.lists(st.text(max_size=30), max_size=5)):
        ids += vocabulary.tokenize(text.encode()).tolist()
        ids.append(data.draw(st.sampled_from(controls)))
    there_and_back(ids, vocabulary)


def test_lone_bytes_are_marks(small: GgufVocabulary) -> None:
    """The first byte of a character without the rest is no text."""
    lone = small.pieces.index(b"\xe2")
    ids = [*small.tokenize(b" hello").tolist(), lone, *small.tokenize(b" world").tolist()]
    text = there_and_back(ids, small)
    assert text.text.count(MARK_FIRST.to_bytes() + b" ") + text.text.count(b"\xfc") == 1


def test_split_characters_are_text(small: GgufVocabulary) -> None:
    """Bytes that make a character together need no mark."""
    ids = [small.pieces.index(bytes((byte,))) for byte in "😀".encode()]
    assert there_and_back(ids, small).text == "😀".encode()


def test_more_kinds_of_marks_than_there_are(vocabulary: GgufVocabulary) -> None:
    lone = [i for i, piece in enumerate(vocabulary.pieces) if piece and max(piece) >= 0xF5]
    controls = [i for i, piece in enumerate(vocabulary.pieces) if not piece]
    marks = (controls + lone)[:20] * 3
    there_and_back(marks, vocabulary)


def test_32k_ids(vocabulary: GgufVocabulary) -> None:
    rng = np.random.default_rng(1)
    there_and_back(rng.integers(0, vocabulary.n_tokens, 32768).tolist(), vocabulary)


def test_a_chat_needs_no_exceptions(vocabulary: GgufVocabulary) -> None:
    """Canonical tokens after a control token: the exceptions of a long chat are few."""
    control = next(i for i, piece in enumerate(vocabulary.pieces) if not piece)
    turn = vocabulary.tokenize(
        b"Once upon a time, there was a little girl.\nShe said: ok."
    ).tolist()
    assert not there_and_back([control, *turn] * 20, vocabulary).exceptions


@given(st.binary(max_size=60), st.binary(max_size=40))
def test_hostile_side_information(small: GgufVocabulary, text: bytes, side: bytes) -> None:
    try:
        to_ids(parse(text, side), small)
    except CodecError:
        pass


@pytest.mark.parametrize(
    "text",
    [b"a\xf7\xbf\xbf\xbfb", b"\xf4\x90\x80\x80", b"\xed\xa0\x80", b"\xe2\xf8\x82\xac", b"\xc3"],
)
def test_a_text_that_is_not_valid_is_damage(text: bytes) -> None:
    """Tokenizers of llama.cpp end the process at some of these."""
    with pytest.raises(CodecError, match="not valid UTF-8"):
        parse(text, Text(b"").side())


def test_an_id_beyond_any_vocabulary_is_damage() -> None:
    for text in (Text(b"", exceptions=(Patch(0, 0, (1 << 33,)),)), Text(b"\xff", (), (1 << 33,))):
        with pytest.raises(CodecError, match="not under"):
            parse(text.text, text.side())


def test_a_closed_vocabulary_is_not_used() -> None:
    vocabulary = GgufVocabulary(bundled_model())
    vocabulary.close()
    with pytest.raises(CodecError, match="closed"):
        vocabulary.tokenize(b"the red otter")


def test_an_exception_outside_its_run_is_damage(small: GgufVocabulary) -> None:
    for patch in (Patch(0, 99, (1,)), Patch(50, 0, (1,))):
        with pytest.raises(CodecError, match="other ids"):
            to_ids(Text(b"hello", exceptions=(patch,)), small)
