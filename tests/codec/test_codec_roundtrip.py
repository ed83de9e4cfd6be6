"""decode(encode(x)) == x for every form and any ids; whatever is wrong is a CodecError."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from towerd.codec import Codec, CodecError, container
from towerd.codec.errors import Damaged, UnknownModel, WrongVocabulary
from towerd.codec.vocabulary import GgufVocabulary

PORTABLE = ("packed", "ranked", "text", "mix", "network")
TEXT = b"You asked how caches work. A cache keeps what was used lately, so that it is near.\n" * 4


@pytest.mark.parametrize("form", PORTABLE)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_ids_come_back(codec: Codec, form: str, data: st.DataObject) -> None:
    n_tokens = len(codec.vocabulary.pieces)
    ids = data.draw(st.lists(st.integers(0, n_tokens - 1), max_size=80))
    assert codec.decode(codec.encode(ids, form=form)).tolist() == ids


@pytest.mark.timeout(600)  # 32k tokens in every form, of large vocabularies where they are given
def test_empty_and_long(codec: Codec, vocabulary: GgufVocabulary) -> None:
    n_tokens = len(codec.vocabulary.pieces)
    rng = np.random.default_rng(0)
    text = vocabulary.tokenize(TEXT).tolist()
    noise = rng.integers(0, n_tokens, 2048).tolist()
    long = [*text * 200, *noise, *text * 200][: 32768 - 1] + [0]
    for ids in ([], [0], noise, long):
        assert codec.decode(codec.encode(ids)).tolist() == ids
    for form, ids in (
        ("packed", rng.integers(0, n_tokens, 32768).tolist()),
        ("mix", [n_tokens - 1] * 32768),
    ):
        assert codec.decode(codec.encode(ids, form=form)).tolist() == ids


def test_auto_takes_the_smallest(codec: Codec, vocabulary: GgufVocabulary) -> None:
    ids = vocabulary.tokenize(TEXT)
    sizes = {form: len(codec.encode(ids, form=form)) for form in PORTABLE}
    assert len(codec.encode(ids)) <= min(sizes.values())


def test_every_flipped_byte_is_an_error(codec: Codec, vocabulary: GgufVocabulary) -> None:
    blob = codec.encode(vocabulary.tokenize(TEXT))
    for at in range(len(blob)):
        with pytest.raises(CodecError):
            codec.decode(blob[:at] + bytes((blob[at] ^ 0x40,)) + blob[at + 1 :])


@pytest.mark.parametrize("form", PORTABLE)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_bits_under_a_good_checksum(
    small: GgufVocabulary, form: str, data: st.DataObject
) -> None:
    """Other bits are an error or decode to the same ids, never to other ids."""
    codec = _small_codec(small)
    ids = small.tokenize(TEXT).tolist()
    blob = container.read(codec.encode(ids, form=form))
    bits = bytearray(blob.chunks[0].bits)
    for _ in range(data.draw(st.integers(1, 3))):
        bits[data.draw(st.integers(0, len(bits) - 1))] = data.draw(st.integers(0, 255))
    chunk = container.CodedChunk(len(ids), bytes(bits[: data.draw(st.integers(0, len(bits)))]))
    try:
        assert (
            codec.decode(container.write(dataclasses.replace(blob, chunks=(chunk,)))).tolist()
            == ids
        )
    except CodecError:
        pass


@pytest.mark.parametrize("form", ["mix", "network"])
def test_nothing_is_left_of_an_earlier_use(small: GgufVocabulary, form: str) -> None:
    """A codec that coded other text before, in threads and with failures, writes the same bytes."""
    ids, base = small.tokenize(TEXT), small.tokenize(b"A cache keeps what was used lately.")
    expected = Codec(small).encode(ids, base=base, form=form)
    used = _small_codec(small)
    blob = container.read(used.encode(ids[5:], form=form))
    cut = container.CodedChunk(blob.chunks[0].n_symbols, blob.chunks[0].bits[:9])
    with ThreadPoolExecutor(3) as pool:
        texts = [ids[n:] for n in range(6)]
        blobs = list(pool.map(lambda some: used.encode(some, form=form), texts))
    for some, each in zip(texts, blobs, strict=True):
        assert used.decode(each).tolist() == some.tolist()
    with pytest.raises(CodecError):
        used.decode(container.write(dataclasses.replace(blob, chunks=(cut,))))
    assert used.encode(ids, base=base, form=form) == expected


def test_errors_say_what_is_missing(small: GgufVocabulary) -> None:
    codec = _small_codec(small)
    blob = container.read(codec.encode(small.tokenize(TEXT), form="ranked"))
    other = dataclasses.replace(blob, vocabulary=b"12345678")
    with pytest.raises(WrongVocabulary, match="serve that model"):
        codec.decode(container.write(other))
    with pytest.raises(UnknownModel, match="use the version of towerd that wrote it"):
        codec.decode(container.write(dataclasses.replace(blob, model=b"12345678")))
    with pytest.raises(Damaged, match="other ids"):
        codec.decode(container.write(dataclasses.replace(blob, hash=b"1234567812345678")))
    with pytest.raises(ValueError, match="not in the vocabulary"):
        codec.encode([small.n_tokens])
    with pytest.raises(ValueError, match="no form called"):
        codec.encode([1], form="zip")


_CODECS: dict[int, Codec] = {}


def _small_codec(small: GgufVocabulary) -> Codec:
    return _CODECS.setdefault(id(small), Codec(small))
