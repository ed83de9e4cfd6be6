"""The bundled model: its output, its origin, and the errors for other files."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.models.stories import convert, read_tokenizer
from towerd.errors import ModelError
from towerd.models.bundled import bundled_model, find_model
from towerd.models.known import SMOLLM2

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "weights" / "stories260K"
SENTENCE = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


def test_it_tells_its_story(greedy: Any, tokenize: Any) -> None:
    """Greedy generation from BOS gives the known text of the checkpoint."""
    wanted, spelled = tokenize(bundled_model(), SENTENCE)
    assert spelled.decode() == " " + SENTENCE
    ids, _ = greedy(bundled_model(), [1], len(wanted))
    assert ids == wanted


def test_a_chat_turn_ends_with_the_token_that_opens_the_next(greedy: Any, tokenize: Any) -> None:
    """The reply's last token is `<s>`, so the next prompt repeats it exactly."""
    prompt, _ = tokenize(bundled_model(), "Tell me about a dog.\n")
    ids, _ = greedy(bundled_model(), [1, *prompt], 200)
    assert 1 in ids


@pytest.mark.skipif(not SHARED.exists(), reason="the checkpoint is not next to this tree")
def test_the_shipped_file_is_the_converted_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "again.gguf"
    convert(SHARED / "stories260K.bin", SHARED / "tok512.bin", out)
    assert out.read_bytes() == bundled_model().read_bytes()


def test_its_licence_travels_with_it() -> None:
    text = bundled_model().with_suffix(".LICENSE").read_text()
    assert text.count("MIT License") == 2


def write_checkpoint(path: Path, *, vocab: int = 260, values: int | None = None) -> Path:
    """A one-layer checkpoint of zeros; `values` overrides how many floats follow the header."""
    dim, hidden, heads, kv_heads, ctx = 8, 16, 2, 1, 4
    n = 260 * dim + dim * 3 + dim * dim * 2 + 2 * dim * kv_heads * 4 + 3 * dim * hidden + ctx * 4
    data = struct.pack("<7i", dim, hidden, 1, heads, kv_heads, vocab, ctx)
    path.write_bytes(data + np.zeros(n if values is None else values, dtype="<f4").tobytes())
    return path


def write_tokenizer(path: Path, n: int = 260) -> Path:
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n"] + [b"<0x%02X>" % i for i in range(256)] + [b" a"]
    body = b"".join(struct.pack("<fi", 0.0, len(p)) + p for p in pieces[:n])
    path.write_bytes(struct.pack("<i", 7) + body)
    return path


def test_any_tied_checkpoint_converts(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "m.gguf"
    convert(write_checkpoint(tmp_path / "m.bin"), write_tokenizer(tmp_path / "t.bin"), out)
    assert out.read_bytes()[:4] == b"GGUF"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 27, b"\0" * 28, b"\xff" * 400])
def test_foreign_checkpoints_are_told_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.bin").write_bytes(content)
    out = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="llama2.c checkpoint"):
        convert(tmp_path / "m.bin", write_tokenizer(tmp_path / "t.bin"), out)
    assert not out.exists()


def test_truncated_and_untied_checkpoints_are_told_so(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "t.bin")
    with pytest.raises(ModelError, match="holds 10 values"):
        convert(write_checkpoint(tmp_path / "a", values=10), tokenizer, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="output matrix of its own"):
        convert(write_checkpoint(tmp_path / "b", vocab=-260), tokenizer, tmp_path / "m.gguf")


def test_foreign_tokenizers_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a llama2.c tokenizer"):
        read_tokenizer(write_tokenizer(tmp_path / "t.bin", 100), 260)
    with pytest.raises(ModelError, match="exactly 259 pieces"):
        read_tokenizer(write_tokenizer(tmp_path / "t.bin"), 259)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models directory, beside an empty current one."""
    (tmp_path / "models").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("towerd.system.paths.models_dir", lambda: tmp_path / "models")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "models"


def test_models_are_found_by_path_and_by_name(models: Path, tmp_path: Path) -> None:
    (models / "m.gguf").write_bytes(b"x")
    assert find_model(Path("m.gguf")) == models / "m.gguf"
    assert find_model(models / "m.gguf") == models / "m.gguf"
    assert find_model(Path("stories")) == find_model(Path("stories260K.gguf")) == bundled_model()
    with pytest.raises(ModelError, match="no model other.gguf on this machine; nearest is m.gguf"):
        find_model(Path("other.gguf"))
    with pytest.raises(ModelError, match="is a folder"):
        find_model(tmp_path)
    with pytest.raises(ModelError, match="no model at"):
        find_model(tmp_path / "none" / "m.gguf")
    Path("stories").write_bytes(b"x")
    assert find_model(Path("stories")) == Path("stories"), "a file that is here comes first"


def test_the_default_is_smollm2_where_it_is(models: Path) -> None:
    """A file with its name and size; with another size it is a broken copy."""
    smollm2 = Path("smollm2")
    assert find_model(None) == bundled_model()
    with pytest.raises(ModelError, match="run towerd models get smollm2"):
        find_model(smollm2)
    SMOLLM2.path.write_bytes(b"half")
    assert find_model(None) == bundled_model()
    os.truncate(SMOLLM2.path, SMOLLM2.bytes)
    assert find_model(None) == find_model(smollm2) == models / SMOLLM2.file
    assert find_model(Path("stories")) == bundled_model()
