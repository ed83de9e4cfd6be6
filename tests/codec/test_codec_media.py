"""Blobs of conversations with pictures: every id comes back, and damage is an error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from towerd.codec import Codec, container
from towerd.codec.errors import Damaged, NewerVersion
from towerd.codec.media import put_back, take_out, tokens_of
from towerd.codec.vocabulary import GgufVocabulary

FORMS = ("packed", "ranked", "text", "mix", "network")
IDS = st.one_of(st.integers(0, 300), st.integers(-(1 << 31), -2))
TEXT = b"What is in this picture? A dog, and behind it the sea.\n"


@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ids=st.lists(IDS, max_size=60), base=st.lists(IDS, max_size=20))
def test_ids_come_back(codec: Codec, form: str, ids: list[int], base: list[int]) -> None:
    blob = codec.encode(ids, base, form)
    assert codec.decode(blob, base).tolist() == ids


def test_a_picture_costs_its_ids(codec: Codec, vocabulary: GgufVocabulary) -> None:
    """The text around it is coded as without it."""
    text = vocabulary.tokenize(TEXT).tolist()
    picture = np.random.default_rng(0).integers(-(1 << 31), -2, 256).tolist()
    without, with_it = codec.encode(text * 2), codec.encode([*text, *picture, *text])
    assert len(with_it) <= len(without) + 4 * len(picture) + 32
    assert (without[4], with_it[4]) == (1, 2)  # earlier releases read what has no media


@pytest.mark.parametrize(
    "media",
    [b"\x01\x05\x01\x00\x00\x00\x80", b"\x01\x00\x02\x00\x00\x00\x80", b"\x02\x00\x01", b"\xff"],
)
def test_damage(codec: Codec, media: bytes) -> None:
    """A medium after the end, one with too few ids, a truncated list."""
    blob = container.read(codec.encode([1, 2, -5, 3], form="packed"))
    data = container.write(dataclasses.replace(blob, media=media))
    with pytest.raises(Damaged):
        codec.decode(data)


def test_more_media_than_ids(codec: Codec) -> None:
    blob = container.read(codec.encode([-5], form="packed"))
    media = take_out(np.array([-5, -6], np.int32))
    with pytest.raises(Damaged):
        codec.decode(container.write(dataclasses.replace(blob, media=media)))


@given(st.lists(IDS, max_size=40))
def test_taken_out_and_put_back(ids: list[int]) -> None:
    array = np.array(ids, np.int32)
    assert put_back(tokens_of(array), take_out(array)).tolist() == ids


def test_a_release_before_media_says_so(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = codec.encode([1, -5, 2])
    monkeypatch.setattr(container, "VERSION", 1)
    with pytest.raises(NewerVersion, match="update towerd"):
        codec.decode(blob)
    with pytest.raises(ValueError, match="not -1"):
        codec.encode([1, -1])
