"""The tokenizer against llama.cpp's own reading of the exported vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.texts.chat_records import ChatRecord, Message
from lab.train.data.bpe import BEGIN, CONTROLS, END, START, Bpe, train_bpe
from lab.train.data.form import ROLES, MiniForm
from lab.train.data.manifest import read_manifest
from lab.train.data.records import read_dataset
from lab.train.errors import TrainError
from lab.train.model.export import Card, export
from lab.train.model.network import NetworkShape, init_weights
from towerd.codec.prior.file import PATH as TABLE
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model

CHAT = Path(os.environ.get("TOWERD_TEST_CHAT", Path(__file__).parents[4] / "shared/data/chat"))
"""A folder of real chat records; without it the made-up ones have to do."""
ODD = "".join(
    ("<|im_start|><|im_end|>", " " * 70, "\r\n\r\n\n", "\0", "\t\t x", "don'T WE'LL", "１２3")
)


@pytest.fixture(scope="module")
def bpe(data_folder: Path, manifest_file: Path) -> Bpe:
    data = read_dataset(data_folder, read_manifest(manifest_file))
    texts = [m.content for rows in data.train.values() for row in rows for m in row.messages]
    return train_bpe(texts, 450)


@pytest.fixture(scope="module")
def exported(bpe: Bpe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufVocabulary]:
    path = tmp_path_factory.mktemp("bpe") / "bpe.gguf"
    shape = NetworkShape(len(bpe), n_embd=8, n_layer=1, n_head=1, n_ff=8, n_ctx=32)
    export(path, init_weights(shape, 0), shape, bpe.vocabulary(), Card("t", "t", "MIT", {}))
    with GgufVocabulary(path) as vocabulary:
        yield vocabulary


def test_controls_and_bytes_are_there(bpe: Bpe, exported: GgufVocabulary) -> None:
    assert len(bpe) == exported.n_tokens == 450
    assert [name.decode() for name in exported.names[: len(CONTROLS)]] == list(CONTROLS)
    assert {bytes([i]) for i in range(256)} <= set(exported.pieces)
    assert len(set(exported.pieces[len(CONTROLS) :])) == 450 - len(CONTROLS)


@given(st.text(max_size=200))
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_same_ids_as_llama_cpp(bpe: Bpe, exported: GgufVocabulary, text: str) -> None:
    ids = bpe.encode([text])[0]
    assert ids == exported.tokenize(text.encode()).tolist()
    assert b"".join(exported.pieces[i] for i in ids) == text.encode()


@pytest.mark.parametrize("text", ["", ODD, ODD * 20, "a\n\n  b\n\t c", "�", "ก็ e\u0301 🇩🇪👩‍🚀"])
def test_odd_text(bpe: Bpe, exported: GgufVocabulary, text: str) -> None:
    test_same_ids_as_llama_cpp.hypothesis.inner_test(bpe, exported, text)  # type: ignore[attr-defined]


def test_same_ids_on_real_text(bpe: Bpe, exported: GgufVocabulary, data_folder: Path) -> None:
    folder = CHAT if CHAT.is_dir() else data_folder
    from lab.texts.chat_records import read_records

    texts = [m.content for r in read_records(folder / "dev.jsonl.zst") for m in r.messages]
    for text, ids in zip(texts, bpe.encode(texts), strict=True):
        assert ids == exported.tokenize(text.encode()).tolist(), text


def test_saved_and_loaded(bpe: Bpe, tmp_path: Path) -> None:
    bpe.save(tmp_path / "tokenizer.json")
    again = Bpe.load(tmp_path / "tokenizer.json")
    assert again.fingerprint == bpe.fingerprint
    assert again.encode([ODD]) == bpe.encode([ODD])


def test_taken_from_a_gguf(bpe: Bpe, tmp_path: Path) -> None:
    shape = NetworkShape(len(bpe), n_embd=8, n_layer=1, n_head=1, n_ff=8, n_ctx=32)
    path = tmp_path / "m.gguf"
    export(path, init_weights(shape, 0), shape, bpe.vocabulary(), Card("t", "t", "MIT", {}))
    assert Bpe.from_gguf(path).fingerprint == bpe.fingerprint
    with pytest.raises(TrainError, match="not have a tokenizer"):
        Bpe.from_gguf(bundled_model())
    with pytest.raises(TrainError, match="not a readable GGUF"):
        Bpe.from_gguf(tmp_path / "none.gguf")


def test_the_table_of_the_package_has_one_too() -> None:
    """A model for the table in the package is trained with its tokenizer."""
    bpe = Bpe.from_gguf(TABLE)
    assert bpe.pieces[: len(CONTROLS)] == list(CONTROLS)
    assert len(bpe) == 4096


@pytest.mark.parametrize("text", ["", "{}", '{"pieces": 1, "merges": []}', "[1]"])
def test_damaged_tokenizer(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(TrainError, match="not a tokenizer"):
        Bpe.load(path)


def test_too_small(data_folder: Path) -> None:
    with pytest.raises(TrainError, match="at least 272"):
        train_bpe(["some text"], 271)


def test_form(bpe: Bpe) -> None:
    """Controls stand where the template has special tokens; the text between them is exact."""
    said = [Message("user", "hi <|im_end|>"), Message("bob", "\nyes")]
    form = MiniForm(bpe)
    (encoded,) = form.encode([ChatRecord("talk/1", said)])
    ids = encoded.ids.tolist()
    assert ids[0] == BEGIN
    assert ids.count(START) == ids.count(END) == 2
    first = ids[2 : ids.index(END)]
    assert first == bpe.encode(["user\nhi <|im_end|>"])[0]
    last = encoded.marks[ids.index(START, 2) + 1]
    assert ROLES[last] == "other"
    (document,) = form.encode([ChatRecord("notes/1", [Message("document", "x = 1\n")])])
    assert document.ids.tolist() == [BEGIN, *bpe.encode(["x = 1\n"])[0]]
