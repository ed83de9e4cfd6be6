"""The portable form with context mixing, on the table in the package."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lab.reference.range_coder import ReferenceDecoder, ReferenceEncoder
from towerd.codec import Codec, container
from towerd.codec.errors import CodecError, UnknownModel, WrongBase
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary

CHAT = (
    b"How do I undo the last commit in git?\n"
    b"You can undo the last commit with `git reset --soft HEAD~1`. This keeps your changes in the "
    b"index, so that you can commit them again. If you want to throw the changes away, use "
    b"`git reset --hard HEAD~1` instead, but be careful: this cannot be undone.\n"
)


FALLBACKS = ("packed", "ranked", "text")


def test_chat_is_small(codec: Codec, vocabulary: GgufVocabulary) -> None:
    """Under two bits a byte from the first sentence on, and only the mini model makes it smaller."""
    ids = vocabulary.tokenize(CHAT)
    blob = codec.encode(ids, form="mix")
    bits = 8 * sum(len(chunk.bits) for chunk in container.read(blob).chunks)
    assert bits < 2.0 * len(CHAT)
    best = codec.encode(ids)
    assert container.read(best).form.name == "network"
    assert len(best) < len(blob) < min(len(codec.encode(ids, form=form)) for form in FALLBACKS)
    assert codec.decode(best).tolist() == ids.tolist()
    assert codec.decode(blob).tolist() == ids.tolist()


def test_the_base_is_context(codec: Codec, vocabulary: GgufVocabulary) -> None:
    """Text that the base contains costs next to nothing, and the blob names that base."""
    control = next(i for i, piece in enumerate(vocabulary.pieces) if not piece)
    base = [control, *vocabulary.tokenize(CHAT).tolist()]
    ids = [*vocabulary.tokenize(CHAT).tolist(), control]
    with_base = codec.encode(ids, base=base, form="mix")
    alone = codec.encode(ids, form="mix")
    payload = [sum(len(c.bits) for c in container.read(b).chunks) for b in (with_base, alone)]
    assert payload[0] < 0.3 * payload[1]
    assert codec.decode(with_base, base=base).tolist() == ids
    for wrong in ([], base[:-1], [*base[:-1], control]):
        with pytest.raises(WrongBase, match="give that prefix as the base"):
            codec.decode(with_base, base=wrong)


def test_damaged_chunks(small: GgufVocabulary) -> None:
    """Other bits decode to other symbols, which the hash of the ids catches."""
    codec = Codec(small)
    ids = small.tokenize(CHAT)
    blob = container.read(codec.encode(ids, form="mix"))
    (chunk,) = blob.chunks
    rng = np.random.default_rng(0)
    for _ in range(40):
        bits = bytearray(chunk.bits)
        bits[rng.integers(len(bits))] ^= 1 << int(rng.integers(8))
        changed = dataclasses.replace(
            blob, chunks=(container.CodedChunk(chunk.n_symbols, bytes(bits)),)
        )
        with pytest.raises(CodecError):
            codec.decode(container.write(changed))
    for n_symbols in (0, 1, chunk.n_symbols - 1, chunk.n_symbols + 1):
        changed = dataclasses.replace(blob, chunks=(container.CodedChunk(n_symbols, chunk.bits),))
        with pytest.raises(CodecError):
            codec.decode(container.write(changed))


def test_another_table_is_named(small: GgufVocabulary) -> None:
    codec = Codec(small)
    blob = container.read(codec.encode(small.tokenize(CHAT), form="mix"))
    other = container.write(dataclasses.replace(blob, model=b"12345678"))
    with pytest.raises(UnknownModel, match="use the version of towerd that wrote it"):
        codec.decode(other)


def test_a_missing_table_is_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("prior") / "mix.gguf"
    path.write_bytes(b"GGUF no")
    with pytest.raises(UnknownModel, match="not a table"):
        file.load(path)


def test_coder_near_the_entropy() -> None:
    rng = np.random.default_rng(0)
    chances = rng.integers(1, 65536, 20000)
    bits = (rng.random(20000) * 65536 < chances).astype(np.int32)
    encoder = ReferenceEncoder()
    for part in range(0, 20000, 1000):
        encoder.put(bits[part : part + 1000], chances[part : part + 1000] / 65536)
    data = encoder.finish()
    decoder = ReferenceDecoder(data)
    assert [decoder.take(int(chance)) for chance in chances] == bits.tolist()
    entropy = -np.log2(np.where(bits == 1, chances, 65536 - chances) / 65536).sum()
    assert len(data) * 8 < 1.001 * entropy + 64


def test_coder_without_decisions() -> None:
    assert ReferenceEncoder().finish() == b""
    ReferenceDecoder(b"").take(40000)
