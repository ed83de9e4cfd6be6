"""Headers say of a model what llama.cpp finds when it loads it, and damage is said in a word."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import real_models
from split_gguf import split

from lab.models.random_gguf import Shape, make_random_gguf
from lab.models.shape import Arch
from towerd.errors import ModelError
from towerd.model.llama_model import LlamaModel
from towerd.model.loadable import check_loadable
from towerd.models.bundled import bundled_model
from towerd.models.header import Header, read_header
from towerd.models.listing import ListedModel
from towerd.models.local.folders import FoundModel
from towerd.settings.config import Config

SHAPE = Shape(
    4, 128, 4, 2, 64, 600, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F16", window=48
)


def kind(model: LlamaModel) -> str:
    """What llama.cpp says of a loaded model."""
    if model.is_recurrent:
        return "recurrent"
    if model.is_hybrid:
        return "hybrid"
    return "window" if model.n_swa else "dense"


def check(path: Path) -> None:
    """The header of `path` says what llama.cpp does, having loaded it."""
    header, model = read_header(path), LlamaModel(path, Config())
    try:
        assert header.memory == kind(model)
        assert header.n_ctx_train == model.n_ctx_train
    finally:
        model.close()
    assert header.weight_bytes == path.stat().st_size


@pytest.mark.parametrize("arch", get_args(Arch))
def test_memory_is_what_llama_cpp_finds(arch: Arch, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_random_gguf(path, replace(SHAPE, arch=arch))
    check(path)


def test_trained_models() -> None:
    for path in (real_models.smollm2(), real_models.gemma()):
        check(path)


def test_token_bytes() -> None:
    """5 layers with keys and values of 4 heads of 8 numbers, two bytes each."""
    assert read_header(bundled_model()).token_bytes == 5 * 2 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a GGUF file"),
        (b"<html>", "is not a GGUF file"),
        (b"GGUF\3\0\0\0" + b"\xff" * 64, "is damaged"),
        (bundled_model().read_bytes()[:5000], "is damaged"),
        (bundled_model().read_bytes()[:-1], "is cut short: 1,055,071 of 1,055,072 bytes"),
    ],
    ids=["empty", "page", "counts", "header", "end"],
)
def test_damage(data: bytes, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=said):
        read_header(tmp_path / "m.gguf")
    assert capfd.readouterr().err == ""


def gguf(**metadata: tuple[str, Any]) -> bytes:
    """A GGUF without tensors, of the architecture `llama`: key -> (type of `struct` or "text", value);
    a list is an array."""
    types = {"I": 4, "i": 5, "f": 6, "text": 8}

    def text(said: str) -> bytes:
        return struct.pack("<Q", len(said)) + said.encode()

    def put(kind: str, value: Any) -> bytes:
        return text(value) if kind == "text" else struct.pack(f"<{kind}", value)

    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata) + 1)
    out += text("general.architecture") + struct.pack("<I", types["text"]) + text("llama")
    for key, (kind, value) in metadata.items():
        out += text(f"llama.{key.replace('__', '.')}")
        if isinstance(value, list):
            out += struct.pack("<IIQ", 9, types[kind], len(value))
            out += b"".join(put(kind, each) for each in value)
        else:
            out += struct.pack("<I", types[kind]) + put(kind, value)
    return out + bytes(64)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("attention__head_count", "text", "many"),
        ("attention__head_count_kv", "f", [1.0, 2.0]),
        ("context_length", "f", 4096.0),
        ("full_attention_interval", "text", "x"),
        ("block_count", "i", -5),
        ("block_count", "I", 2**32 - 1),
        ("attention__kv_lora_rank", "text", "x"),
        ("attention__kv_lora_rank", "I", 2**32 - 1),
    ],
)
def test_numbers_that_are_none(key: str, kind: str, value: Any, tmp_path: Path) -> None:
    """In what lists models and in what loads one: a sentence that names the key."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(**{key: (kind, value)}))
    read = check_loadable if "lora" in key else read_header
    with pytest.raises(ModelError, match=f"is damaged: its llama.{key.replace('__', '.')} is no"):
        read(path)


def test_a_number_for_each_layer(tmp_path: Path) -> None:
    """Keys and values of 1 and 3 heads of 8 numbers, two bytes each."""
    path = tmp_path / "m.gguf"
    numbers = {"block_count": 2, "attention__head_count": 4, "embedding_length": 32}
    metadata = {key: ("I", n) for key, n in numbers.items()}
    path.write_bytes(gguf(**metadata, attention__head_count_kv=("I", [1, 3])))
    assert read_header(path).token_bytes == (1 + 3) * 2 * 8 * 2


def test_a_split_model(tmp_path: Path) -> None:
    """All files count: their sizes, their tensors, and whether they are there and whole."""
    paths = split(bundled_model(), tmp_path / "m.gguf", tensors_max=20)
    assert len(paths) == 3
    whole, header = read_header(bundled_model()), read_header(paths[0])
    assert (header.n_tensors, header.n_ctx_train) == (whole.n_tensors, whole.n_ctx_train)
    assert header.weight_bytes == sum(path.stat().st_size for path in paths)
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    with pytest.raises(ModelError, match="m-00002-of-00003.gguf is cut short"):
        read_header(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelError, match="m-00002-of-00003.gguf: No such file"):
        read_header(paths[0])


@pytest.mark.parametrize(("ram_gib", "n_ctx"), [(16, 32768), (10, 16384), (8.4, 0), (4, 0)])
def test_what_fits(ram_gib: float, n_ctx: int) -> None:
    """7 GiB of weights and 128 KiB a token, in nine tenths of the RAM."""
    header = Header("llama", "", "dense", 131072, 2**17, 7 * 2**30, 1, True, True)
    model = ListedModel(FoundModel("m", Path("m"), ""), header)
    assert model.ctx_that_fits(int(ram_gib * 2**30)) // 16384 * 16384 == n_ctx
