"""Random weights of every architecture: llama.cpp loads them, and they behave alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from gguf import GGUFReader

from lab.commands.make import ARCHS, SCALINGS
from lab.models.random_gguf import Shape, make_random_gguf
from lab.models.shape import FACTOR_ARCHS, UNROTATED, Arch, Scaling
from towerd.errors import ModelError

SHAPE = Shape(4, 128, 4, 2, 256, 600, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32")
PROMPT = "<|im_start|>user\n hello<|im_end|><|im_start|>assistant\n"
CASES = [
    (arch, scaling)
    for arch in get_args(Arch)
    for scaling in get_args(Scaling)
    if arch in FACTOR_ARCHS.get(scaling, (arch,))
    and (scaling != "linear" or arch == "llama")
    and (scaling == "none" or arch not in UNROTATED)
]


@pytest.mark.parametrize(("arch", "scaling"), CASES)
def test_generates_sane_text(
    tmp_path: Path, greedy: Any, tokenize: Any, arch: Arch, scaling: Scaling
) -> None:
    path = tmp_path / "m.gguf"
    make_random_gguf(path, replace(SHAPE, arch=arch, rope_scaling=scaling))
    ids, logits = greedy(path, tokenize(path, PROMPT)[0], 48)
    assert np.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0
    assert len(set(ids)) >= 12


@pytest.mark.parametrize("arch", get_args(Arch))
@pytest.mark.parametrize("ftype", ["F16", "Q8_0"])
def test_other_types_load(tmp_path: Path, greedy: Any, arch: Arch, ftype: Any) -> None:
    path = tmp_path / "m.gguf"
    make_random_gguf(path, replace(SHAPE, arch=arch, ftype=ftype, head_dim=64, n_embd=256))
    assert np.isfinite(greedy(path, [400, 401], 2)[1]).all()


def test_positions_matter(tmp_path: Path, greedy: Any) -> None:
    """Every RoPE scaling changes the output."""
    seen = []
    for scaling in get_args(Scaling):
        path = tmp_path / f"{scaling}.gguf"
        make_random_gguf(path, replace(SHAPE, n_ctx_train=512, rope_scaling=scaling))
        seen.append(greedy(path, list(range(400, 440)), 1)[1])
    for i, logits in enumerate(seen):
        assert all(np.abs(logits - other).max() > 0.1 for other in seen[:i])


def test_weights_do_not_depend_on_the_architecture(tmp_path: Path) -> None:
    """Layers that two architectures share have the same weights."""
    tensors = []
    for arch in ("llama", "qwen3"):
        path = tmp_path / arch
        make_random_gguf(path, replace(SHAPE, arch=arch))
        tensors.append({tensor.name: tensor.data for tensor in GGUFReader(path).tensors})
    assert np.array_equal(tensors[0]["blk.1.attn_k.weight"], tensors[1]["blk.1.attn_k.weight"])
    gain = tensors[1]["blk.1.attn_k_norm.weight"]
    assert 0.05 < gain.std() < 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "gpt5"}, "architecture must be one of"),
        ({"rope_scaling": "ntk"}, "RoPE scaling must be one of"),
        ({"arch": "qwen3", "rope_scaling": "llama3"}, "no frequency factors"),
        ({"arch": "stablelm", "rope_scaling": "longrope"}, "no frequency factors"),
        ({"arch": "gptneox", "head_dim": 64}, "must fill the embedding"),
        ({"arch": "stablelm", "n_head": 32}, "too small"),
        ({"arch": "deepseek2", "ftype": "Q8_0"}, "half-heads"),
    ],
)
def test_impossible_architectures_are_told_so(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(SHAPE, **change)


def test_the_command_offers_all_of_them() -> None:
    assert list(get_args(Arch)) == ARCHS
    assert list(get_args(Scaling)) == SCALINGS
