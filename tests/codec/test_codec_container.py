"""The container against hostile bytes: anything but a valid blob is one clear error."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.codec import container, varint
from towerd.codec.container import BY_NAME, FORMS, Blob, CodedChunk
from towerd.codec.errors import CodecError, Damaged, NewerVersion, Truncated, UnknownModel

small_bytes = st.binary(max_size=40)


@st.composite
def blobs(draw: st.DrawFn) -> Blob:
    form = draw(st.sampled_from(FORMS))
    chunks = draw(st.lists(st.builds(CodedChunk, st.integers(0, 3000), small_bytes), max_size=5))
    base_ids = draw(st.integers(0, 1 << 20))
    return Blob(
        form,
        draw(st.binary(min_size=8, max_size=8)),
        draw(st.binary(min_size=16, max_size=16)),
        draw(st.integers(0, 5000)),
        tuple(chunks),
        draw(small_bytes),
        base_ids,
        draw(st.binary(min_size=16, max_size=16)) if base_ids else b"",
        draw(st.binary(min_size=8, max_size=8)) if form.has_model else b"",
    )


def sealed(data: bytes) -> bytes:
    """`data` with a length and a checksum that hold: what an attacker would write."""
    data = data[:6] + len(data).to_bytes(4, "little") + data[10:-8]
    return data + hashlib.blake2b(data, digest_size=8).digest()


def example() -> Blob:
    chunks = (CodedChunk(3, b"abc"), CodedChunk(2, b"de"))
    form = BY_NAME["network"]
    return Blob(form, b"v" * 8, b"h" * 16, 5, chunks, b"side", 7, b"b" * 16, b"m" * 8)


@given(blobs())
def test_read_gives_what_was_written(blob: Blob) -> None:
    assert container.read(container.write(blob)) == blob


def test_every_flipped_bit_is_an_error() -> None:
    data = container.write(example())
    for at in range(len(data) * 8):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(CodecError):
            container.read(bytes(changed))


def test_every_cut_is_an_error_that_says_so() -> None:
    data = container.write(example())
    for n in range(len(data)):
        with pytest.raises(Truncated, match="truncated"):
            container.read(data[:n])
    with pytest.raises(Damaged):
        container.read(data + b"x")


def test_a_newer_version_names_the_remedy() -> None:
    data = bytearray(container.write(example()))
    data[4] = container.VERSION + 1
    with pytest.raises(NewerVersion, match="update towerd"):
        container.read(bytes(data))


@pytest.mark.parametrize("code", [4, 5])
def test_a_form_that_is_no_longer_read(code: int) -> None:
    """A blob of the forms that took llama.cpp's numbers of one machine."""
    data = bytearray(container.write(example()))
    data[5] = code
    with pytest.raises(UnknownModel, match="no longer read.*the towerd that wrote it"):
        container.read(sealed(bytes(data)))


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(CodecError):
        container.read(data)


@settings(max_examples=200)
@given(blobs(), st.data())
def test_hostile_bytes_under_a_good_checksum(blob: Blob, data: st.DataObject) -> None:
    """Whatever is changed, the reader gives a blob whose parts fit in the bytes, or CodecError."""
    raw = bytearray(container.write(blob))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(5, len(raw) - 9))
        raw[at] = data.draw(st.integers(0, 255))
    try:
        read = container.read(sealed(bytes(raw)))
    except CodecError:
        return
    sizes = [len(chunk.bits) for chunk in read.chunks]
    assert sum(sizes) + len(read.side) <= len(raw)
    assert read.n_ids <= len(raw) * container.IDS_PER_BYTE_MAX


def test_a_blob_is_as_long_as_its_ids_need() -> None:
    """A reader can trust the count of ids within the length of the blob."""
    blob = dataclasses.replace(example(), n_ids=1 << 20, chunks=(CodedChunk(1 << 20, b""),))
    data = container.write(blob)
    assert len(data) * container.IDS_PER_BYTE_MAX >= blob.n_ids
    assert container.read(data) == blob


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
def test_varints(values: list[int]) -> None:
    """The vectorised form writes what the plain one does, and both read it back."""
    data = varint.put_all(values)
    assert varint.pack(np.array(values, np.uint32)) == data
    assert varint.unpack(data, len(values)).tolist() == values
    assert varint.VarintReader(data).numbers(len(values)) == values


@given(st.binary(max_size=30), st.integers(0, 10))
def test_hostile_varints(data: bytes, n: int) -> None:
    for read in (lambda: varint.VarintReader(data).numbers(n), lambda: varint.unpack(data, n)):
        try:
            assert len(read()) == n
        except Damaged:
            continue
