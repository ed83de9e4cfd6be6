from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import towerd.engine.base
from towerd.errors import InvalidRequest
from towerd.model import deepstack
from towerd.model.llama_model import init_backend
from towerd.model.vocab import Vocab
from towerd.wire import token_bytes_max

BUNDLED = Path(towerd.engine.base.__file__).parents[1] / "data" / "stories260K.gguf"
VOCAB_DIR = os.environ.get("TOWERD_TEST_VOCABS", "")
"""A folder of vocabulary-only GGUFs, such as `models/` of llama.cpp's source."""
VOCABS = sorted(Path(VOCAB_DIR).glob("ggml-vocab-*.gguf")) if VOCAB_DIR else []
VOCAB_PARAMS: list[Path | None] = [*VOCABS] if VOCABS else [None]
COMMON = "".join(map(chr, range(32, 127))) + "\n\t\0éßñ中文語😀한"
"""Not every vocabulary has every byte."""
LOSSY = ("bert", "nomic")  # WordPiece and Unigram normalise the text


def load(path: Path) -> tuple[Any, Vocab]:
    init_backend()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    return model, Vocab(model)


def with_pre_tokenizer(gguf: bytes, name: bytes) -> bytes:
    """The same vocabulary under another `tokenizer.ggml.pre` (a string: type 8, length, text)."""
    at = gguf.index(b"tokenizer.ggml.pre") + len(b"tokenizer.ggml.pre")
    kind, size = struct.unpack_from("<IQ", gguf, at)
    assert kind == 8
    return gguf[:at] + struct.pack("<IQ", 8, len(name)) + name + gguf[at + 12 + size :]


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    if not BUNDLED.exists():
        pytest.skip("the bundled model is not built")
    model, vocab = load(BUNDLED)
    yield vocab
    lib.llama_model_free(model)


@pytest.fixture(scope="module", params=VOCAB_PARAMS, ids=lambda p: p.stem if p else "none")
def real(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Vocab]]:
    if request.param is None:
        pytest.skip("TOWERD_TEST_VOCABS is not set")
    model, vocab = load(request.param)
    yield request.param, vocab
    lib.llama_model_free(model)


def test_tables(vocab: Vocab) -> None:
    assert len(vocab.pieces) == vocab.n_vocab == 512
    assert vocab.bos_text == "<s>"
    assert vocab.eos_text == "</s>"
    assert vocab.eos_id in vocab.eog_ids
    assert vocab.n_vocab - 1 not in vocab.eog_ids
    assert vocab.piece(vocab.eos_id) == b"</s>"
    assert vocab.detokenize([vocab.bos_id, vocab.eos_id]) == b"<s></s>"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_round_trip(vocab: Vocab, text: str) -> None:
    ids = vocab.tokenize(text, False, False)
    assert ids.dtype == np.int32
    # SentencePiece puts a space before the first word.
    assert vocab.detokenize(ids).decode() == (" " + text if text else "")


def test_special_tokens(vocab: Vocab) -> None:
    assert vocab.tokenize("", True, True).tolist() == [vocab.bos_id]
    assert vocab.tokenize("</s>", False, True).tolist() == [vocab.eos_id]
    assert vocab.eos_id not in vocab.tokenize("</s>", False, False)


def test_nul_and_bytes(vocab: Vocab) -> None:
    assert vocab.detokenize(vocab.tokenize("a\0b", False, False)) == b" a\0b"
    assert vocab.detokenize(vocab.tokenize(b"a\0b", False, False)) == b" a\0b"


def test_large_text(vocab: Vocab) -> None:
    text = "Once upon a time. " * 60_000
    assert vocab.detokenize(vocab.tokenize(text, False, True)).decode() == " " + text


def test_lone_surrogates_are_refused(vocab: Vocab) -> None:
    with pytest.raises(InvalidRequest):
        vocab.tokenize("\ud800", False, False)


@pytest.mark.parametrize("ids", [[0, 512], [-1], [1 << 40], ["a"], [1 << 70], [None]])
def test_invalid_ids_are_named(vocab: Vocab, ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="[Tt]oken id"):
        vocab.validate(ids)


def test_valid_ids_pass(vocab: Vocab) -> None:
    assert vocab.validate([0, 511]).dtype == np.int32
    assert len(vocab.validate([])) == 0


def test_many_threads(vocab: Vocab) -> None:
    text = "The little girl went to the park. " * 200
    want = vocab.tokenize(text, True, True).tolist()
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: vocab.tokenize(text, True, True).tolist(), range(16)))
    assert got == [want] * 16


@pytest.mark.model
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(COMMON, max_size=60))
def test_real_vocabularies_round_trip(real: tuple[Path, Vocab], text: str) -> None:
    path, vocab = real
    if any(name in path.stem for name in LOSSY):
        pytest.skip("this tokenizer is not reversible")
    out = vocab.detokenize(vocab.tokenize(text, False, False)).decode()
    assert out in (text, " " + text)


@pytest.mark.model
def test_real_vocabularies_have_long_tokens(real: tuple[Path, Vocab]) -> None:
    path, vocab = real
    if any(name in path.stem for name in LOSSY):
        pytest.skip("this tokenizer is not reversible")
    spaces = vocab.tokenize("x" + " " * 64 + "\0", False, False)
    assert vocab.detokenize(spaces).strip(b" ") == b"x" + b" " * 64 + b"\0"
    for token in sorted(range(vocab.n_vocab), key=lambda i: -len(vocab.pieces[i]))[:20]:
        buffer = ctypes.create_string_buffer(4096)
        n = lib.llama_token_to_piece(vocab.ptr, token, buffer, 4096, 0, True)
        assert vocab.pieces[token] == buffer.raw[:n]


@pytest.mark.model
@pytest.mark.parametrize("pre", ["deepseek-llm", "tekken", "gpt-4o", "exaone-moe"])
@pytest.mark.parametrize("unit", ["a", "a ", " ", "!", "aA"])
def test_unbroken_runs_do_not_overflow_the_stack(pre: str, unit: str, tmp_path: Path) -> None:
    path = Path(VOCAB_DIR, "ggml-vocab-gpt-2.gguf")
    if not VOCAB_DIR or not path.exists():
        pytest.skip("TOWERD_TEST_VOCABS is not set")
    other = tmp_path / "vocab.gguf"
    other.write_bytes(with_pre_tokenizer(path.read_bytes(), pre.encode()))
    model, vocab = load(other)
    text = unit * (60_000 // len(unit))
    assert vocab.detokenize(vocab.tokenize(text, False, False)).decode() == text
    if unit == "a":
        with pytest.raises(InvalidRequest, match="without a break"):
            vocab.tokenize("a" * (deepstack.RUN_BYTES_MAX + 1), False, False)
    lib.llama_model_free(model)


def test_longest_run() -> None:
    assert deepstack.longest_run(b"", "x") == 0
    assert deepstack.longest_run(b"abc", "x") == 3
    assert deepstack.longest_run(b"ab  \t\nc", "x") == 4
    assert deepstack.longest_run(b"ab cd\n\nef", "exaone-moe") == 5


def test_deep_calls_pass_errors_on() -> None:
    assert deepstack.call_deep(lambda: 7, 100_000) == 7
    with pytest.raises(KeyError):
        deepstack.call_deep(lambda: os.environ["no such name"], 100_000)


@pytest.mark.parametrize("path", [BUNDLED, *VOCABS], ids=lambda path: path.stem)
def test_no_token_stands_for_more_text(path: Path) -> None:
    """A text has at least as many tokens as its length says, whatever it consists of."""
    model, vocab = load(path)
    try:
        most = token_bytes_max(ctypes.cast(model, ctypes.c_void_p).value or 0)
        longest = sorted(vocab.pieces, key=len)[-20:]
        texts = [piece.decode("utf-8", "replace") for piece in longest]
        for text in (*texts, *COMMON, "\u2581", "\u2581 ", " \n", "  a", "\ufffd", "x\u2581x"):
            data = (text * 300).encode()
            assert vocab.tokenize(data, False, True).size * most >= len(data) or not most
        assert most or any(name in path.stem for name in (*LOSSY, "phi-3"))
    finally:
        lib.llama_model_free(model)
