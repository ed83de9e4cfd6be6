"""GGUFs that cannot be served: one sentence says why, and nothing crashes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from services import OpenService

from lab.models.random_gguf import PRESETS, make_random_gguf
from lab.models.vocabulary import synthetic
from lab.train.objectives.teacher import silence_llama_cpp
from towerd.engine.embedded.context.core import load_core
from towerd.errors import ConfigError, ModelError
from towerd.model.llama_model import init_backend
from towerd.settings.config import Config
from towerd.store.catalog.sqlite import SqliteCatalog

N_LAYER, N_EMBD, N_FF, N_CTX = 2, 64, 128, 512


def refused(path: Path, tmp_path: Path) -> str:
    """What is said when a daemon is to serve it."""
    with pytest.raises(ModelError) as failed:
        load(path, tmp_path)
    said = failed.value.message
    assert str(path) in said
    assert said.endswith(".")
    assert "\n" not in said
    return said


def load(path: Path, tmp_path: Path, *flags: str) -> None:
    config = Config(model=path, store_dir=tmp_path / "store", ctx_size=256, llama_server_args=flags)
    catalog = SqliteCatalog(tmp_path / "catalog.sqlite")
    try:
        load_core(config, catalog).close()
    finally:
        catalog.close()


def header_only(path: Path, arch: str, kind: str = "") -> Path:
    writer = GGUFWriter(path, arch)
    if kind:
        writer.add_type(kind)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_architecture_from_elsewhere(tmp_path: Path) -> None:
    """Its name is in llama.cpp's log, which another part of the process may have taken."""
    init_backend()
    silence_llama_cpp()
    said = refused(header_only(tmp_path / "m.gguf", "clockwork"), tmp_path)
    assert "'clockwork', which this llama.cpp does not know" in said


@pytest.mark.parametrize(("arch", "kind"), [("clip", ""), ("clip", "mmproj"), ("other", "mmproj")])
def test_a_projector(tmp_path: Path, arch: str, kind: str) -> None:
    said = refused(header_only(tmp_path / "mmproj.gguf", arch, kind), tmp_path)
    assert "not a model by itself" in said
    assert "--mmproj FILE" in said


@pytest.mark.parametrize(
    ("arch", "what", "key"),
    [
        ("qwen2vl", "rope_dimension_sections", "qwen2vl.rope.dimension_sections"),
        ("deepseek2", "rope_dimension_count", "deepseek2.rope.dimension_count"),
        ("gemma3", "layer_norm_rms_eps", "gemma3.attention.layer_norm_rms_epsilon"),
    ],
)
def test_metadata_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: Any, what: str, key: str
) -> None:
    """Also of RoPE, where llama.cpp has no default of its own."""
    monkeypatch.setattr(GGUFWriter, f"add_{what}", lambda *_: None)
    path = tmp_path / "m.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=2, arch=arch))
    assert f"lacks {key} in its metadata" in refused(path, tmp_path)


def test_an_encoder(tmp_path: Path) -> None:
    """BERT, whole: llama.cpp would load it, but there is no state to continue from."""
    path = tmp_path / "bert.gguf"
    make_bert(path)
    assert "reads text in both directions" in refused(path, tmp_path)


def make_bert(path: Path) -> None:
    rng = np.random.default_rng(0)
    vocabulary = synthetic(512)
    writer = GGUFWriter(path, "bert")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_vocab_size(len(vocabulary))
    writer.add_token_type_count(2)
    vocabulary.write(writer, "")

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32) * np.float32(0.05))

    def layer(name: str, *shape: int) -> None:
        tensor(f"{name}.weight", *shape)
        tensor(f"{name}.bias", shape[0])

    tensor("token_embd.weight", len(vocabulary), N_EMBD)
    tensor("token_types.weight", 2, N_EMBD)
    tensor("position_embd.weight", N_CTX, N_EMBD)
    layer("token_embd_norm", N_EMBD)
    for number in range(N_LAYER):
        block = f"blk.{number}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            layer(block + name, N_EMBD, N_EMBD)
        for name in ("attn_output_norm", "layer_output_norm"):
            layer(block + name, N_EMBD)
        layer(block + "ffn_up", N_FF, N_EMBD)
        layer(block + "ffn_down", N_EMBD, N_FF)
    finish(writer)


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--spec-draft-ngl", "abc", "--spec-draft-ngl does not take this value."),
        ("--draft", "8", "--draft: the argument has been removed. use --spec-draft-n-max"),
        ("--logit-bias", "x", "--logit-bias: invalid input format."),
        ("--json-schema", "x", "--json-schema takes JSON: parse error at line 1, column 1"),
        ("--media-path", "/nowhere", "--media-path: not a directory: /nowhere."),
    ],
)
def test_flags_are_read_before_the_model(
    tmp_path: Path, flag: str, value: str, reason: str
) -> None:
    """Loading it may take minutes; this one could not be loaded."""
    path = header_only(tmp_path / "model.gguf", "llama")
    with pytest.raises(ConfigError, match=f"refuses a flag: {re.escape(reason)}"):
        load(path, tmp_path, flag, value)


async def test_a_predictor_is_read_before_the_model(
    service_on: OpenService, tmp_path: Path
) -> None:
    path, missing = header_only(tmp_path / "model.gguf", "llama"), tmp_path / "missing"
    with pytest.raises(ConfigError, match=f"^{missing} is not a predictor: No such file"):
        async with service_on(path, predictor=missing):
            pass
