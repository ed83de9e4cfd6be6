"""Texts that are cut into chunks, which are read side by side."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fed_predictor import FedPredictor, read_in_python

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.codec import Codec, container
from towerd.codec.container import CodedChunk
from towerd.codec.errors import CodecError, Damaged
from towerd.codec.forms.form import Coded
from towerd.codec.forms.network import Network, cut
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.prior import file
from towerd.codec.text import from_ids
from towerd.codec.vocabulary import GgufVocabulary
from towerd.kernels.lm import Counts

STORY = (
    b" Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    b"One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
BLOBS = Path(__file__).with_name("blobs")
"""Blobs that an earlier release wrote."""


class Plain(FedPredictor):
    """An `ExactPredictor` whose texts are read by the specification."""

    def __init__(self, path: Path) -> None:
        self._exact = exact = ExactPredictor(path)
        super().__init__(exact.n_tokens, exact.n_ctx, exact.lanes_max, exact.name)
        self.n_calls = 0

    def reset(self) -> None:
        self._exact.reset()

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        self.n_calls += 1
        return self._exact.feed(tokens)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, whose context is shorter than a chunk."""
    path = tmp_path_factory.mktemp("mini") / "mini.gguf"
    n_tokens = len(file.bundled().ids)
    make_random_gguf(path, Shape(1, 64, 4, 2, 128, n_tokens, n_ctx_train=16))
    return path


@pytest.fixture(scope="module")
def network(small: GgufVocabulary, path: Path) -> Network:
    return Network(small, file.bundled(), ExactPredictor(path), chunk_symbols=20)


def test_chunks_are_nearly_equal() -> None:
    """And of a number that cores can share, near to what was asked for."""
    parts = cut(np.arange(14, dtype=np.int32), 4, 8)
    assert [len(part) for part in parts] == [4, 4, 3, 3]
    assert np.concatenate(parts).tolist() == list(range(14))
    sizes = {n: len(cut(np.zeros(n, np.int32), 100, 12)) for n in (0, 149, 151, 590, 650, 9999)}
    assert sizes == {0: 1, 149: 1, 151: 2, 590: 4, 650: 8, 9999: 12}


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_any_number_of_cores_reads_the_same(
    small: GgufVocabulary,
    path: Path,
    network: Network,
    n_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the specification does, which takes the chunks' symbols one after the other."""
    ids = np.asarray(small.tokenize(STORY * 2), np.int32)
    coded = network.encode(ids, ids[:9])
    assert len(coded.chunks) == 4
    network.n_threads = n_threads
    assert network.decode(coded, len(ids), ids[:9]).tolist() == ids.tolist()
    read_in_python(monkeypatch)
    plain = Plain(path)
    specified = Network(small, file.bundled(), plain, chunk_symbols=20)
    assert specified.encode(ids, ids[:9]) == coded
    plain.n_calls = 0
    assert specified.decode(coded, len(ids), ids[:9]).tolist() == ids.tolist()
    assert plain.n_calls == max(chunk.n_symbols for chunk in coded.chunks)


def test_chunks_of_any_length(small: GgufVocabulary, path: Path, network: Network) -> None:
    """A blob may have chunks that are longer than the ones before, or that are empty."""
    ids = np.asarray(small.tokenize(STORY), np.int32)
    symbols = network.mini.symbols(from_ids(ids, small).text)
    parts = [symbols[:3], symbols[3:3], symbols[3:40], symbols[40:]]
    bits = network.lanes.encode(parts, symbols[:0])
    found = network.lanes.decode([len(part) for part in parts], bits, symbols[:0], 3)
    assert found == [part.tolist() for part in parts]


def test_the_context_is_part_of_the_form(small: GgufVocabulary, path: Path) -> None:
    """Texts are written with a short one, and both are read; predictors agree on what it means."""
    tokens = np.random.default_rng(0).integers(0, 500, 40).tolist()
    short, loaded = ExactPredictor(path).within(8), ExactPredictor(path, n_ctx=8)
    assert short.n_ctx == loaded.n_ctx == 8
    for token in tokens:
        assert np.array_equal(short.feed([(0, token)]), loaded.feed([(0, token)]))
    codec, ids = Codec(small), np.asarray(small.tokenize(STORY * 12), np.int32)
    now = codec.text_coder()
    assert isinstance(now, Network)
    whole = copy.copy(now)
    whole.n_ctx, whole.chunk_symbols = 0, 1 << 20
    coded = {network.n_ctx: network.encode(ids, ids[:0]) for network in (now, whole)}
    assert len(now.mini.symbols(from_ids(ids, small).text)) > now.n_ctx == 256
    assert coded[0].chunks != coded[256].chunks
    for each in coded.values():
        assert now.decode(each, len(ids), ids[:0]).tolist() == ids.tolist()
    assert container.read(codec.encode(ids, form="network")).form.n_ctx == 256


def test_damaged_chunks(small: GgufVocabulary, network: Network) -> None:
    """Other bits, lengths or numbers of chunks end with an error on all cores."""
    codec, network.n_threads = Codec(small, [network]), 2
    ids = small.tokenize(STORY)
    blob = container.read(codec.encode(ids, form="network"))
    rng = np.random.default_rng(0)
    for _ in range(40):
        chunks = list(blob.chunks)
        at = int(rng.integers(len(chunks)))
        bits = rng.bytes(int(rng.integers(1, 40)))
        chunks[at] = CodedChunk(chunks[at].n_symbols + int(rng.integers(0, 9)), bits)
        changed = container.write(container.Blob(**{**vars(blob), "chunks": tuple(chunks)}))
        with pytest.raises(CodecError):
            codec.decode(changed)
    assert codec.decode(container.write(blob)).tolist() == ids.tolist()
    many = Coded(blob.side, (CodedChunk(1, b"1"),) * 100)
    with pytest.raises(Damaged, match="100 chunks"):
        network.decode(many, 100, ids[:0])


def earlier_ids(small: GgufVocabulary) -> tuple[list[int], list[int]]:
    """The base and the ids of the blobs in the folder."""
    base = [1, *small.tokenize(STORY[:80]).tolist()]
    marks = "€ 5, \0 and 64 spaces:".encode() + b" " * 64 + b"."
    return base, [*small.tokenize(STORY).tolist(), 2, 1, *small.tokenize(marks).tolist()]


@pytest.mark.parametrize("name", ["packed", "ranked", "text", "mix", "network", "network-chunks"])
def test_blobs_of_earlier_releases(small: GgufVocabulary, name: str) -> None:
    """Each form, of one text after a base; `network` in one chunk and in three."""
    base, ids = earlier_ids(small)
    blob = (BLOBS / f"{name}.blob").read_bytes()
    assert container.read(blob).form.n_ctx == 0
    assert Codec(small).decode(blob, base).tolist() == ids


@pytest.mark.parametrize("name", ["network-short", "text-media"])
def test_later_blobs_of_earlier_releases(small: GgufVocabulary, name: str) -> None:
    """`network` with a short context, and media among the ids."""
    base, ids = earlier_ids(small)
    ids = [*ids[:9], -5, -6, -7, *ids[9:]] if name == "text-media" else ids
    blob = (BLOBS / f"{name}.blob").read_bytes()
    assert Codec(small).decode(blob, base).tolist() == ids
