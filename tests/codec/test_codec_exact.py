"""The form `network`: a mini model with the same numbers on every machine."""

from __future__ import annotations

import gc
import struct
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fed_predictor import FedPredictor, read_in_python
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_reader import LlamaReader

import towerd
from lab.models.random_gguf import Shape, make_random_gguf
from towerd.codec import Codec, container
from towerd.codec.errors import CodecError, UnknownModel
from towerd.codec.forms import mini
from towerd.codec.forms.network import Network, PredictorPool
from towerd.codec.models import exact
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.models.gguf_header import read_header
from towerd.codec.models.weights import load_weights
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.kernels import dispatch
from towerd.kernels.lm import COUNT_ONE, Counts

BUNDLED = Path(towerd.__file__).parent / "data" / "stories260K.gguf"
STORY = (
    b" Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    b"One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
BOS = 1
N_TOKENS = len(file.bundled().ids)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with as many tokens as the mini vocabulary has."""
    path = tmp_path_factory.mktemp("mini") / "mini.gguf"
    make_random_gguf(path, Shape(1, 64, 4, 2, 128, N_TOKENS, n_ctx_train=32))
    return path


@pytest.fixture(scope="module")
def network(small: GgufVocabulary, path: Path) -> Network:
    return Network(small, file.bundled(), ExactPredictor(path, lanes_max=4), chunk_symbols=30)


def ids_of(small: GgufVocabulary, text: bytes = STORY) -> list[int]:
    return [*small.tokenize(text).tolist(), BOS]


def chances(counts: Counts) -> npt.NDArray[np.float64]:
    shares: npt.NDArray[np.float64] = counts / counts.sum()
    return shares


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        (Shape(2, 64, 4, 4, 128, 500, n_ctx_train=64, ftype="F32"), 2e-3),
        (Shape(2, 96, 6, 2, 160, 500, n_ctx_train=64, ftype="F32", rope_freq_base=10000.0), 2e-3),
        (Shape(3, 64, 4, 2, 96, 500, n_ctx_train=64, ftype="F16", head_dim=32), 5e-3),
        (Shape(2, 128, 2, 1, 192, 500, n_ctx_train=64, ftype="Q8_0"), 5e-2),
    ],
)
def test_llama_cpp_says_the_same(shape: Shape, most: float, tmp_path: Path) -> None:
    """The probabilities of llama.cpp for the same GGUF, which keeps keys and values as float16, and
    rounds what it multiplies with weights of f16 and q8_0 to these formats."""
    make_random_gguf(tmp_path / "m.gguf", shape)
    compare(tmp_path / "m.gguf", np.random.default_rng(0).integers(3, 500, 40).tolist(), most)


def test_llama_cpp_says_the_same_of_a_trained_model(small: GgufVocabulary) -> None:
    compare(BUNDLED, [BOS, *ids_of(small)], 1e-2)


def compare(path: Path, tokens: list[int], most: float) -> None:
    """Two lanes of unlike texts, token by token."""
    ours = ExactPredictor(path, lanes_max=2)
    with LlamaReader(path, 2) as theirs:
        for one, other in zip(tokens, reversed(tokens), strict=True):
            step = [(0, one), (1, other)]
            for mine, wanted in zip(ours.feed(step), theirs.feed(step), strict=True):
                assert mine.min() >= 1
                assert mine.max() == COUNT_ONE + 1
                assert np.abs(chances(mine) - wanted).max() < most


def test_a_text_longer_than_the_context(path: Path) -> None:
    """It is cut to its last quarter."""
    predictor = ExactPredictor(path)
    tokens = np.random.default_rng(0).integers(0, N_TOKENS, 50).tolist()
    once = predictor.feed([(0, token) for token in tokens])
    predictor.reset()
    again = predictor.feed([(5, token) for token in tokens[24:]])
    assert all(map(np.array_equal, once[32:], again[8:]))


def test_the_kernels_are_checked(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The tiny model has the same counts with all kernels; others are refused."""
    for name in dispatch.available():
        if name != "metal":
            monkeypatch.setenv("TOWERD_KERNELS", name)
            assert exact.tiny_hash() == exact.KNOWN
    monkeypatch.setattr(exact, "KNOWN", "00000000")
    exact.check_kernel.cache_clear()
    with pytest.raises(UnknownModel, match="do not give the numbers"):
        ExactPredictor(path)
    exact.check_kernel.cache_clear()


def test_round_trip(small: GgufVocabulary, network: Network) -> None:
    """Chunks side by side, with a base and without."""
    codec, ids = Codec(small, [network]), ids_of(small) * 3
    blob = codec.encode(ids, form="network")
    parsed = container.read(blob)
    assert len(parsed.chunks) == 4
    assert codec.decode(blob).tolist() == ids
    assert codec.decode(codec.encode([], form="network")).tolist() == []
    based = codec.encode(ids, base=ids, form="network")
    assert codec.decode(based, base=ids).tolist() == ids
    assert len(based) < len(blob)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 511), max_size=60), st.text(max_size=40))
def test_any_ids(small: GgufVocabulary, network: Network, ids: list[int], text: str) -> None:
    codec = Codec(small, [network])
    for some in (ids, [int(i) for i in small.tokenize(text.encode())]):
        assert codec.decode(codec.encode(some, form="network")).tolist() == some


def test_other_kernels_and_threads_read_it(
    small: GgufVocabulary, network: Network, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither kernels nor threads change the numbers."""
    ids = ids_of(small)
    blob = Codec(small, [network]).encode(ids, form="network")
    names = [name for name in dispatch.available() if name != "metal"]
    for name, n_threads in zip([*names, ""], (1, 2, 3, 4), strict=False):
        monkeypatch.setenv("TOWERD_KERNELS", name)
        predictor = ExactPredictor(path, n_threads=n_threads)
        other = Codec(small, [Network(small, file.bundled(), predictor)])
        assert other.decode(blob).tolist() == ids


def test_another_model_is_refused(
    small: GgufVocabulary, network: Network, path: Path, tmp_path: Path
) -> None:
    """A blob names its model, and how far that looks back; without one it says what is missing."""
    blob = Codec(small, [network]).encode(ids_of(small), form="network")
    make_random_gguf(tmp_path / "other.gguf", Shape(1, 64, 4, 2, 128, N_TOKENS), seed=1)
    for predictor in (ExactPredictor(tmp_path / "other.gguf"), ExactPredictor(path, n_ctx=16)):
        other = Codec(small, [Network(small, file.bundled(), predictor)])
        with pytest.raises(UnknownModel, match="needs the model or table"):
            other.decode(blob)
    with pytest.raises(UnknownModel, match="needs the model or table|not loaded"):
        Codec(small).decode(blob)
    with pytest.raises(UnknownModel, match="512 tokens"):
        Network(small, file.bundled(), ExactPredictor(BUNDLED))


class Knowing(FedPredictor):
    """A predictor that has read the text."""

    window = 1

    def __init__(self, small: GgufVocabulary, ids: list[int]) -> None:
        super().__init__(N_TOKENS, 1 << 20, 1, b"knowing.")
        mix = file.bundled()
        text = Network(small, mix, self).mini.symbols(
            b"".join(small.pieces[i] or b"\n" for i in ids)
        )
        self.text = [int(mix.ids[rank]) for rank in text]

    def reset(self) -> None:
        self.at = 0

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        counts = np.ones(N_TOKENS, np.uint32)
        if self.at < len(self.text):
            counts[self.text[self.at]] = COUNT_ONE
        self.at += 1
        return [counts]


def test_auto_takes_it_where_it_is_smallest(
    small: GgufVocabulary, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in_python(monkeypatch)
    ids = [int(i) for i in small.tokenize(STORY * 4)]
    codec = Codec(small, [Network(small, file.bundled(), Knowing(small, ids), 1 << 20)])
    blob = codec.encode(ids)
    assert container.read(blob).form.name == "network"
    assert codec.decode(blob).tolist() == ids
    unhelpful = Codec(small, [network]).encode(ids)
    monkeypatch.setattr(mini, "PATH", tmp_path / "none.gguf")
    assert unhelpful == Codec(small).encode(ids)
    assert container.read(unhelpful).form.name == "mix"


def test_the_model_of_the_package(
    small: GgufVocabulary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is used if it is there; one that cannot be read is ignored, and the log says why."""
    ids = ids_of(small)
    monkeypatch.setattr(mini, "PATH", tmp_path / "mini.gguf")
    without = Codec(small).encode(ids)
    (tmp_path / "mini.gguf").write_bytes(BUNDLED.read_bytes())
    codec = Codec(small)
    assert codec.encode(ids) == without
    assert "coded without the mini model" in caplog.text
    assert "other tokens than the table" in caplog.text
    trained_like(tmp_path / "mini.gguf")
    codec = Codec(small)
    blob = codec.encode(ids, form="network")
    assert codec.decode(blob).tolist() == ids


def trained_like(path: Path) -> None:
    """A model with the tokenizer of the table."""
    make_random_gguf(path, Shape(1, 32, 2, 1, 64, 1, n_ctx_train=64), vocab=file.PATH)


def damaged(path: Path, to: Path, changes: dict[str, Any], without: str = "") -> Path:
    """The model in `path` with other keys or tensors: an array replaces a tensor."""
    reader = GGUFReader(path)
    writer = GGUFWriter(to, "llama" if "arch" not in changes else str(changes["arch"]))
    for name in (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "rope.dimension_count",
        "rope.scaling.factor",
    ):
        field = reader.get_field(f"llama.{name}")
        value = changes.get(name, field.contents() if field is not None else None)
        if value is not None:
            add: Any = {str: writer.add_string, float: writer.add_float32}.get(type(value))
            (add or writer.add_uint32)(f"llama.{name}", value)
    for tensor in reader.tensors:
        if tensor.name != without:
            data = changes.get(tensor.name, tensor.data)
            writer.add_tensor(
                tensor.name, data, raw_dtype=None if tensor.name in changes else tensor.tensor_type
            )
    for name, data in changes.items():
        if name.startswith("new."):
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


SMALL = np.zeros((64, 32), np.float32)
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "other architecture": ("architecture is not llama", {"arch": "qwen2"}),
    "no layers": ("block_count is no size", {"block_count": 0}),
    "layers as text": ("block_count is not a number", {"block_count": "two"}),
    "fractional size": ("embedding_length is no size", {"embedding_length": 64.0}),
    "many layers": ("fewer tensors than its 100000 layers", {"block_count": 100000}),
    "huge embedding": ("is no size up to", {"embedding_length": 2**31}),
    "another embedding": ("has the shape", {"embedding_length": 128}),
    "more layers than are there": ("no tensor blk.1", {"block_count": 2}),
    "heads that do not fit": ("heads do not fit", {"attention.head_count_kv": 3}),
    "an odd head": ("heads do not fit", {"attention.key_length": 15}),
    "wide heads": ("heads do not fit", {"attention.key_length": 1 << 16}),
    "other heads": ("has the shape", {"attention.head_count": 8}),
    "no context": ("context_length is no size", {"context_length": 0}),
    "odd rotation": ("angles of RoPE", {"rope.dimension_count": 7}),
    "wide rotation": ("angles of RoPE", {"rope.dimension_count": 32}),
    "scaled rotation": ("rope.scaling.factor, which", {"rope.scaling.factor": 2.0}),
    "norm of halves": ("not of float32", {"output_norm.weight": np.ones(64, np.float16)}),
    "long norm": ("has the shape", {"output_norm.weight": np.ones(65, np.float32)}),
    "NaN": ("not finite", {"output_norm.weight": np.full(64, np.nan, np.float32)}),
    "infinite half": ("not finite", {"blk.0.attn_k.weight": SMALL.T.astype(np.float16) + np.inf}),
    "integers": ("of ggml's type", {"blk.0.attn_k.weight": SMALL.T.astype(np.int32)}),
    "a bias": ("new.bias, which is not evaluated", {"new.bias": np.ones(64, np.float32)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_models(name: str, path: Path, tmp_path: Path) -> None:
    what, changes = HOSTILE[name]
    if "blk.0.attn_k.weight" in changes:
        value = changes["blk.0.attn_k.weight"]
        changes = {"blk.0.attn_k.weight": np.resize(value, (32, 64))}
    with pytest.raises(UnknownModel, match=what):
        ExactPredictor(damaged(path, tmp_path / "bad.gguf", changes))


def test_models_with_parts_missing(path: Path, tmp_path: Path) -> None:
    """Any tensor but the output, which may be the embedding."""
    for tensor in GGUFReader(path).tensors:
        bad = damaged(path, tmp_path / "bad.gguf", {}, without=tensor.name)
        if tensor.name == "output.weight":
            embedding, output, *_ = load_weights(bad).matrices
            assert embedding is output
            continue
        with pytest.raises(UnknownModel, match=r"no tensor|no embedding"):
            ExactPredictor(bad)
    with pytest.raises(UnknownModel, match="cannot be read"):
        ExactPredictor(tmp_path / "none.gguf")
    (tmp_path / "big.gguf").touch()
    with (tmp_path / "big.gguf").open("r+b") as big:
        big.truncate(1 << 30)
    with pytest.raises(UnknownModel, match="at most"):
        ExactPredictor(tmp_path / "big.gguf")


def test_bf16(path: Path, tmp_path: Path) -> None:
    """It is read exactly, like the same numbers in float32."""
    values = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    cut = (raw.astype(np.uint32) << 16).view(np.float32)
    writer_bytes = damaged(path, tmp_path / "f32.gguf", {"blk.0.attn_k.weight": cut}).read_bytes()
    header = read_header(memoryview(writer_bytes))
    entry = header.tensors["blk.0.attn_k.weight"]
    name = b"blk.0.attn_k.weight"
    at = writer_bytes.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16
    changed = bytearray(writer_bytes)
    changed[at : at + 4] = struct.pack("<I", 30)
    changed[entry.offset : entry.offset + raw.nbytes] = raw.tobytes()
    (tmp_path / "bf16.gguf").write_bytes(changed)
    one, other = (load_weights(tmp_path / name) for name in ("f32.gguf", "bf16.gguf"))
    assert all(
        np.array_equal(a[1], b[1]) for a, b in zip(one.matrices, other.matrices, strict=True)
    )


def test_damaged_files(path: Path, tmp_path: Path) -> None:
    """Cut anywhere, or with a wrong count: one sentence, and quickly."""
    data, bad = path.read_bytes(), tmp_path / "bad.gguf"
    for n in (0, 3, 7, 20, 100, 5000, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:n])
        with pytest.raises(UnknownModel, match=r"damaged|beyond the end"):
            load_weights(bad)
    for at in (8, 16, 24):  # tensors, keys, the length of the first key
        bad.write_bytes(data[:at] + b"\xff" * 7 + data[at + 7 :])
        with pytest.raises(UnknownModel, match="damaged"):
            load_weights(bad)
    array = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 1 << 62)
    for hostile in (
        array,
        array[:-12] + struct.pack("<IQ", 8, 1 << 62),
        array[:-12] + struct.pack("<IQ", 9, 1 << 62),
    ):
        bad.write_bytes(hostile + bytes(100))
        with pytest.raises(UnknownModel, match="damaged"):
            load_weights(bad)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_flipped_bytes(path: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Of header and weights: a model or a CodecError, nothing else."""
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        raw[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    (tmp_path / "bad.gguf").write_bytes(raw)
    try:
        ExactPredictor(tmp_path / "bad.gguf").feed([(0, 1), (0, 2)])
    except CodecError:
        return


def test_few_of_many_copies_are_kept(path: Path) -> None:
    """However many users there were at a time, and each has one of its own."""
    pool = PredictorPool(ExactPredictor(path), 2)
    with ExitStack() as stack:
        borrowed = [stack.enter_context(pool.borrow()) for _ in range(5)]
        alive = [weakref.ref(each) for each in borrowed]
        assert len({id(each) for each in borrowed}) == 5
        del borrowed
    gc.collect()
    assert len([each for each in alive if each() is not None]) == 1 + 2


def test_sessions_do_not_wait_for_each_other(
    small: GgufVocabulary, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two can be coded at the same time, with the numbers of a model that is used alone."""
    codec = Codec(small, [network])
    texts = [ids_of(small), ids_of(small)[::-1]]
    alone = [codec.encode(ids, form="network") for ids in texts]
    both, feed = threading.Barrier(2, timeout=60), ExactPredictor.feed
    begun = threading.local()

    def together(self: ExactPredictor, pairs: Sequence[tuple[int, int]]) -> Any:
        found = feed(self, pairs)
        if not hasattr(begun, "there"):
            begun.there = both.wait()  # until the other session has begun, too
        return found

    monkeypatch.setattr(ExactPredictor, "feed", together)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda ids: codec.encode(ids, form="network"), texts, timeout=60))
    assert found == alone
