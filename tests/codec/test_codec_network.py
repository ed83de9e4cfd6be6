"""Forms that need a model: exact with llama.cpp on this machine, and safe when it changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import towerd
from towerd.codec import Codec, container
from towerd.codec.errors import CodecError, UnknownModel
from towerd.codec.models.base import COUNT_ONE, as_counts
from towerd.codec.models.llama import LlamaPredictor
from towerd.codec.network import Same, cut
from towerd.codec.vocabulary import GgufVocabulary

BUNDLED = Path(towerd.__file__).parent / "data" / "stories260K.gguf"
STORY = (
    b" Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    b"One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
BOS = 1


@pytest.fixture(scope="module")
def stories() -> Iterator[LlamaPredictor]:
    with LlamaPredictor(BUNDLED, lanes_max=4, n_ctx=64) as predictor:
        yield predictor


@pytest.fixture(scope="module")
def same(small: GgufVocabulary, stories: LlamaPredictor) -> Codec:
    return Codec(small, [Same(small, stories, first=BOS, chunk_symbols=40)])


def story_ids(small: GgufVocabulary, times: int = 3) -> list[int]:
    return [*small.tokenize(STORY).tolist(), BOS] * times


def payload(blob: bytes) -> int:
    return sum(len(chunk.bits) for chunk in container.read(blob).chunks)


def test_same_tokenizer(same: Codec, small: GgufVocabulary) -> None:
    """Ids come back through chunks side by side, longer than the model's context too; a model that
    knows the text beats the form that does not."""
    ids = story_ids(small, 8)
    blob = same.encode(ids, form="same")
    assert len(container.read(blob).chunks) == 4
    assert same.decode(blob).tolist() == ids
    once = story_ids(small, 1)
    assert payload(same.encode(once, form="same")) < payload(same.encode(once, form="ranked"))


def test_any_ids_and_a_base(same: Codec, small: GgufVocabulary) -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 57):
        ids = rng.integers(0, small.n_tokens, n).tolist()
        assert same.decode(same.encode(ids, form="same")).tolist() == ids
    assert same.decode(same.encode([], form="same")).tolist() == []
    ids = story_ids(small, 1)
    blob = same.encode(ids, base=ids, form="same")
    assert payload(blob) < 0.6 * payload(same.encode(ids, form="same"))
    assert same.decode(blob, base=ids).tolist() == ids


def test_a_fault_is_caught_and_the_fallback_read(
    same: Codec, small: GgufVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other logits decode to other ids: the blob says so, and its fallback still has them."""
    ids = story_ids(small)
    blob = same.encode(ids, form="same")
    bare = container.write(dataclasses.replace(container.read(blob), fallback=b""))
    assert same.decode(bare).tolist() == ids
    monkeypatch.setenv("TOWERD_CODEC_FAULT", "logits")
    with pytest.raises(CodecError, match="other ids|damaged"):
        same.decode(bare)
    assert same.decode(blob).tolist() == ids


def test_another_runtime_reads_the_fallback(same: Codec, small: GgufVocabulary) -> None:
    """Another thread count is another runtime, and no model at all is none."""
    ids = story_ids(small)
    blob = same.encode(ids, form="same")
    with LlamaPredictor(BUNDLED, n_threads=2, lanes_max=4, n_ctx=64) as predictor:
        other = Codec(small, [Same(small, predictor, first=BOS)])
        assert not other.can_decode(blob)
        assert other.decode(blob).tolist() == ids
    assert same.can_decode(blob)
    assert not Codec(small).can_decode(blob)
    assert Codec(small).decode(blob).tolist() == ids
    bare = container.write(dataclasses.replace(container.read(blob), fallback=b""))
    with pytest.raises(UnknownModel, match="not loaded"):
        Codec(small).decode(bare)


def test_canary(
    small: GgufVocabulary, stories: LlamaPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Codec(small, [Same(small, stories, first=BOS)])
    probe = codec.make_probe("same")
    assert codec.check_probe(probe)
    ids = story_ids(small)
    blob = codec.encode(ids, form="same")
    with monkeypatch.context() as patch:
        patch.setenv("TOWERD_CODEC_FAULT", "logits")
        assert not codec.check_probe(probe)
    assert not codec.can_decode(blob)
    assert codec.decode(blob).tolist() == ids
    with pytest.raises(ValueError, match="needs no probe"):
        codec.make_probe("ranked")


def test_models_of_other_vocabularies_are_refused(
    small: GgufVocabulary, stories: LlamaPredictor, tmp_path: Path
) -> None:
    class Other:
        pieces, names = [*small.pieces, b"x"], [*small.names, b""]

        def tokenize(self, text: bytes) -> list[int]:
            return [int(i) for i in small.tokenize(text)]

    with pytest.raises(UnknownModel, match="shares its tokenizer"):
        Same(Other(), stories)
    (tmp_path / "no.gguf").write_bytes(b"no")
    with pytest.raises(UnknownModel, match="cannot be loaded"):
        LlamaPredictor(tmp_path / "no.gguf")


def test_counts() -> None:
    """Every token has a count, and the counts are the softmax."""
    logits = np.array([0, 1, 2, -80], np.float32)
    counts = as_counts(logits)
    assert counts.min() == 1
    wanted = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    assert np.abs(counts / COUNT_ONE - wanted).max() < 1e-6


def test_chunks_are_nearly_equal() -> None:
    parts = cut(np.arange(10, dtype=np.int32), 4, 8)
    assert [len(part) for part in parts] == [4, 3, 3]
    assert len(cut(np.arange(100, dtype=np.int32), 4, 8)) == 8
    assert np.concatenate(parts).tolist() == list(range(10))
