"""Random-weight models: reproducible, well-behaved, of any shape; and their vocabularies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from lab.models.random_gguf import PRESETS, Shape, make_random_gguf
from lab.models.vocabulary import N_SYNTHETIC_MIN, from_gguf, synthetic
from towerd.errors import ModelError
from towerd.models.bundled import bundled_model

SMALL = Shape(2, 128, 4, 2, 256, 600, n_ctx_train=512)
PROMPT = "<|im_start|>user\n hello<|im_end|><|im_start|>assistant\n"
IM_END = 4


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in "abc")
    make_random_gguf(first, SMALL, seed=7)
    make_random_gguf(second, SMALL, seed=7)
    make_random_gguf(other, SMALL, seed=8)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_a_tensor_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """A deeper model starts with the shallower one's weights, except for the residual scale."""
    make_random_gguf(tmp_path / "a", replace(SMALL, ftype="F32"))
    make_random_gguf(tmp_path / "b", replace(SMALL, n_layer=5, ftype="F32"))
    first, second = (
        {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / name).tensors}
        for name in "ab"
    )
    assert np.array_equal(first["blk.1.attn_k.weight"], second["blk.1.attn_k.weight"])


@pytest.mark.parametrize("ftype", ["F32", "F16", "Q8_0"])
def test_every_type_generates_sane_text(
    tmp_path: Path, greedy: Any, tokenize: Any, ftype: Any
) -> None:
    path = tmp_path / "m.gguf"
    make_random_gguf(path, replace(SMALL, ftype=ftype))
    ids, logits = greedy(path, tokenize(path, PROMPT)[0], 64)
    assert np.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0
    assert len(set(ids)) >= 16
    assert IM_END not in ids


def test_replies_survive_being_tokenized_again(tmp_path: Path, greedy: Any, tokenize: Any) -> None:
    """Else no second turn of a benchmark chat would find the first one's tokens."""
    path = tmp_path / "m.gguf"
    make_random_gguf(path, SMALL)
    prompt = tokenize(path, PROMPT)[0]
    ids, _ = greedy(path, prompt, 48)
    piece = pieces(path)
    reply = "".join(piece[i] for i in ids).replace("\u2581", " ")
    again, spelled = tokenize(path, PROMPT + reply + "<|im_end|>")
    assert again == prompt + ids + [IM_END]
    assert spelled.decode() == PROMPT + reply + "<|im_end|>"


def pieces(path: Path) -> list[str]:
    field = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    assert field is not None
    return [str(piece) for piece in field.contents()]


def test_any_text_is_tokenized_and_comes_back(tmp_path: Path, tokenize: Any) -> None:
    path = tmp_path / "m.gguf"
    make_random_gguf(path, SMALL)
    for text in ("The Quick brown fox, 3.14!\n\tEnd", "żółw 漢字 🦙", "  two  spaces "):
        ids, spelled = tokenize(path, text)
        assert spelled.decode() == text
        assert len(ids) > 1


@given(st.integers(min_value=N_SYNTHETIC_MIN, max_value=40_000))
def test_synthetic_vocabularies_have_the_asked_size(n_vocab: int) -> None:
    vocabulary = synthetic(n_vocab)
    fields = {field.key: field.value for field in vocabulary.fields}
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(vocabulary) == len(tokens) == len(set(tokens)) == n_vocab
    generated = [token for token, quiet in zip(tokens, vocabulary.silent, strict=True) if not quiet]
    known = set(tokens)
    assert generated
    assert all(word[:-1] in known for word in generated)


def test_a_vocabulary_can_be_copied(tmp_path: Path) -> None:
    """The bundled model's tokenizer, with its template, in a random model."""
    path = tmp_path / "m.gguf"
    make_random_gguf(path, SMALL, vocab=bundled_model())
    made, source = from_gguf(path), from_gguf(bundled_model())
    assert len(made) == len(source) == 512
    assert made.fields == source.fields
    assert made.template == source.template
    make_random_gguf(path, SMALL, vocab=bundled_model(), chat_template="{{ 1 }}")
    assert from_gguf(path).template == "{{ 1 }}"


def test_foreign_vocabularies_are_told_so(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    with pytest.raises(ModelError, match="not a readable GGUF"):
        from_gguf(bad)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        from_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="at least 448"):
        synthetic(300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 0}, "at least 1"),
        ({"n_head_kv": 3}, "KV heads must divide"),
        ({"n_embd": 130}, "heads must divide the embedding"),
        ({"head_dim": 33}, "must be even"),
        ({"n_ff": 100}, "multiples of 32"),
        ({"ftype": "Q9"}, "file type must be one of"),
    ],
)
def test_impossible_shapes_are_told_so(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(SMALL, **change)


def test_presets_are_the_shapes_they_promise() -> None:
    big = PRESETS["1b"]
    assert (big.n_layer, big.n_embd, big.n_head, big.n_head_kv) == (16, 2048, 32, 8)
    assert (big.n_ff, big.n_vocab, big.ftype) == (8192, 32000, "Q8_0")
    assert big.n_ctx_train >= 8192


def test_progress_ends_at_the_whole_and_nothing_is_left_behind(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = tmp_path / "m.gguf"
    make_random_gguf(path, SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_random_gguf(path, SMALL, progress=stop)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
