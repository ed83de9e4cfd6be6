"""Leaving out tokens: only when asked, never control tokens, and it says how much."""

from __future__ import annotations

import pytest

from lab.codec.lossy import reduce
from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary

TEXT = "Please tell me more about the zyxqv, the pwmrtk, the qqjxzb, the vbnkmw and the hhgrtq of it.\n"
NAMES = (b"<s>", b"<|im_start|>", b"<|im_start|>x", b"", b"[a.*b]")


def test_what_is_left_stands_in_the_text() -> None:
    loss = reduce(TEXT, 1e-4)
    assert 0 < loss.n_lost < loss.n_symbols
    rest = iter(TEXT)
    assert all(char in rest for char in loss.text)
    assert len(loss.text) < len(TEXT)
    assert "tell me more about the" in loss.text


def test_control_tokens_stay() -> None:
    """Whatever they are called, and however unlikely they are where they stand."""
    names = ["<|im_start|>x", "<s>", "[a.*b]", "<|im_start|>", *["<s>"] * 3]
    text = "".join(f"{name}{TEXT}" for name in names)
    loss = reduce(text, 0.5, NAMES, "<s> before [a.*b]")
    left = [loss.text.count(name) for name in ("<|im_start|>x", "<s>", "[a.*b]", "<|im_start|>")]
    assert left == [1, 4, 1, 2]
    assert loss.n_lost > 50


def test_what_the_base_says_is_likely() -> None:
    alone, after = reduce(TEXT, 1e-3), reduce(TEXT, 1e-3, base=TEXT)
    assert after.n_lost < alone.n_lost / 2


def test_characters_are_lost_whole() -> None:
    text = "Some signs: \u2603 \U0001f40c \u16a0\u16b1\u16de \u0f40\u0f0b \u2603, and words again."
    loss = reduce(text, 0.01)
    assert loss.n_lost > 0
    assert "\ufffd" not in loss.text
    rest = iter(text)
    assert all(char in rest for char in loss.text)


def test_what_is_left_is_coded_exactly(codec: Codec, vocabulary: GgufVocabulary) -> None:
    loss = reduce(TEXT, 1e-2, vocabulary.names)
    ids = vocabulary.tokenize(loss.text.encode())
    assert codec.decode(codec.encode(ids, form="mix")).tolist() == ids.tolist()
    assert len(codec.encode(ids)) < len(codec.encode(vocabulary.tokenize(TEXT.encode())))


def test_nothing_is_given_up_by_default() -> None:
    loss = reduce(TEXT, 0.0)
    assert (loss.n_lost, loss.text) == (0, TEXT)
    for p_min in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="p_min"):
            reduce(TEXT, p_min)
