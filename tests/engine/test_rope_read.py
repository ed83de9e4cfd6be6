"""What a GGUF says about its RoPE, and what is refused rather than guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from lab.models.gguf_file import writing
from lab.models.random_gguf import Shape, make_random_gguf
from towerd.model.rope import (
    FULL_FACTORS,
    OWN_N_ROT,
    PLAIN,
    REASONS,
    WINDOWED,
    WITH_FACTORS,
    Running,
    read_rope,
)
from towerd.slots.errors import StateError

NORM, NEOX, MROPE, IMROPE = 0, 2, 8, 40
COMMON: dict[str, Any] = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 256,
    "attention.head_count": 4,
}


def write(path: Path, arch: str, keys: dict[str, Any], **tensors: list[float]) -> Path:
    """A GGUF of metadata and small tensors: enough to read a RoPE from."""
    with writing(path, arch) as writer:
        for name, value in (COMMON | keys).items():
            _add(writer, f"{arch}.{name}", value)
        for name, values in tensors.items():
            writer.add_tensor(f"{name}.weight", np.array(values, np.float32))
        writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_defaults(file: Path) -> None:
    """A file without a word about its RoPE has llama.cpp's defaults."""
    rope = read_rope(write(file, "llama", {}), Running(NORM, 4096))
    assert len(rope.layers) == 4
    layer = rope.layers[0]
    assert (layer.kind, layer.head_dim, layer.n_rot, layer.first) == ("norm", 64, 64, 0)
    assert (layer.freq_base, layer.freq_scale, layer.ext_factor) == (10000.0, 1.0, 0.0)
    assert (layer.n_ctx_orig, layer.factors, layer.sections) == (4096, None, None)


@pytest.mark.parametrize(
    ("keys", "running", "scale"),
    [
        ({"rope.scaling.factor": 4.0}, {}, 0.25),  # the default type is linear
        ({"rope.scale_linear": 2.0}, {}, 0.5),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, {}, 1.0),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, {"freq_scale": 0.5}, 1.0),
        ({"rope.scaling.factor": 0.0}, {}, 1.0),
        ({"rope.scaling.factor": 4.0}, {"freq_scale": 0.5}, 0.5),
    ],
)
def test_scale(file: Path, keys: dict[str, Any], running: dict[str, Any], scale: float) -> None:
    rope = read_rope(write(file, "llama", keys), Running(NORM, 4096, **running))
    assert rope.layers[0].freq_scale == scale
    assert rope.layers[0].ext_factor == 0.0


def test_yarn_and_its_betas(file: Path) -> None:
    """Only mistral3 reads the betas from the file."""
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 1024,
        "rope.scaling.yarn_beta_fast": 4.0,
        "rope.scaling.yarn_beta_slow": 0.5,
    }
    layer = read_rope(write(file, "qwen3", keys), Running(NEOX, 4096)).layers[0]
    assert (layer.ext_factor, layer.n_ctx_orig) == (1.0, 1024)
    assert (layer.beta_fast, layer.beta_slow) == (32.0, 1.0)
    layer = read_rope(write(file, "mistral3", keys), Running(NORM, 4096)).layers[0]
    assert (layer.beta_fast, layer.beta_slow) == (4.0, 0.5)


def test_longrope_factors_follow_the_context(file: Path) -> None:
    keys = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1024}
    tensors = {"rope_factors_long": [2.0] * 32, "rope_factors_short": [1.0] * 32}
    path = write(file, "phi3", keys, **tensors)
    assert read_rope(path, Running(NEOX, 1024)).layers[0].factors == (1.0,) * 32
    assert read_rope(path, Running(NEOX, 1280)).layers[0].factors == (2.0,) * 32
    both = write(file, "llama", keys, rope_freqs=[3.0] * 32, **tensors)
    assert read_rope(both, Running(NORM, 4096)).layers[0].factors == (3.0,) * 32
    assert (
        read_rope(write(file, "qwen3", {}, **tensors), Running(NEOX, 1)).layers[0].factors is None
    )


def test_parts_of_heads(file: Path) -> None:
    """First elements for partial rotation, last ones for latent attention."""
    keys = {"attention.key_length": 96, "rope.dimension_count": 32}
    for arch, first in (("gptneox", 0), ("deepseek2", 64), ("minicpm3", 64)):
        layer = read_rope(write(file, arch, keys), Running(NEOX, 4096)).layers[-1]
        assert (layer.head_dim, layer.n_rot, layer.first) == (96, 32, first)


def test_layers_without_rope(file: Path) -> None:
    smollm3 = read_rope(write(file, "smollm3", {"block_count": 9}), Running(NORM, 4096))
    assert [i for i, layer in enumerate(smollm3.layers) if layer.kind == "none"] == [3, 7]
    for on in (True, False):
        path = write(file, "granite", {"rope.scaling.finetuned": on})
        kinds = {layer.kind for layer in read_rope(path, Running(NORM, 4096)).layers}
        assert kinds == ({"norm"} if on else {"none"})


@pytest.mark.parametrize(
    ("arch", "keys", "bases"),
    [
        # by default the last of a period has no window; the cache has those layers first
        ("gemma3", {"block_count": 7, "attention.sliding_window": 9}, "f wwwwww"),
        ("gemma3", {"block_count": 7}, "fffffff"),
        ("gemma2", {"block_count": 5}, "ff www"),
        ("gemma2", {"attention.sliding_window_pattern": [True, False, True, True]}, "f www"),
        ("gemma2", {"attention.sliding_window_pattern": [0, 1]}, "fff w"),
        ("gemma2", {"attention.sliding_window_pattern": 4}, "f www"),
        ("cohere2moe", {"block_count": 5}, "-- fff"),
        ("cohere2moe", {"block_count": 5, "leading_dense_block_count": 1}, "f- fff"),
        ("exaone4", {"block_count": 64}, "-" * 16 + " " + "f" * 48),
        ("exaone4", {"attention.sliding_window": 9}, "ffff"),
        ("afmoe", {"attention.sliding_window": 9, "block_count": 5}, "- wwww"),
        (
            "smallthinker",
            {
                "attention.sliding_window": 9,
                "attention.sliding_window_pattern": 2,
                "block_count": 6,
            },
            "-f- www",
        ),
        ("gemma3n", {"block_count": 22}, "ffff" + " " + "w" * 16),
        (
            "gemma4",
            {
                "attention.sliding_window_pattern": [1, 1, 0, 1, 1, 0],
                "attention.shared_kv_layers": 3,
                "block_count": 6,
            },
            "f ww",
        ),
    ],
)
def test_windowed_layers(file: Path, arch: str, keys: dict[str, Any], bases: str) -> None:
    """Which layers have a window, and in which order. f, w: the frequencies of layers without and with
    one; -: no RoPE."""
    own = {"rope.freq_base": 3e4, "rope.freq_base_swa": 2e4}
    rope = read_rope(write(file, arch, own | keys), Running(NEOX, 4096))
    found = [
        "-" if layer.kind == "none" else {3e4: "f", 2e4: "w"}[layer.freq_base]
        for layer in rope.layers
    ]
    at = len(found) - rope.n_window
    assert "".join([*found[:at], " " * (rope.n_window > 0), *found[at:]]) == bases


def test_windows_have_the_frequencies_of_the_file(file: Path) -> None:
    """Overrides of the context are those of the other layers alone."""
    keys = {"rope.freq_base": 3e4, "rope.scaling.factor": 4.0}
    running = Running(NEOX, 4096, freq_base=7e4, freq_scale=0.5)
    for arch, base, scale in (
        ("gemma2", 3e4, 0.25),
        ("gemma3", 1e4, 1.0),
        ("muse-glimmer", 3e4, 1.0),
        ("cohere2", 7e4, 0.5),
        ("olmo2", 7e4, 1.0),
    ):
        written = write(file, arch, keys | {"attention.sliding_window": 9, "block_count": 6})
        layer = read_rope(written, running).layers[-1]
        assert (layer.freq_base, layer.freq_scale) == (base, scale), arch


def test_windows_that_the_file_does_not_list(file: Path) -> None:
    with pytest.raises(StateError, match="does not say which layers"):
        read_rope(write(file, "gemma4", {}), Running(NEOX, 4096))


def test_draft_layers_are_not_in_the_cache(file: Path) -> None:
    path = write(file, "glm4moe", {"block_count": 5, "nextn_predict_layers": 1})
    assert len(read_rope(path, Running(NEOX, 4096)).layers) == 4


def test_sections(file: Path) -> None:
    path = write(file, "qwen2vl", {"rope.dimension_sections": [16, 8, 8]})
    layer = read_rope(path, Running(MROPE, 4096)).layers[0]
    assert (layer.kind, layer.sections, layer.interleaved) == ("neox", (16, 8, 8, 0), False)
    path = write(file, "qwen3vl", {"rope.dimension_sections": [12, 10, 10, 0]})
    rope = read_rope(path, Running(IMROPE, 4096))
    assert rope.is_multi
    assert rope.layers[0].interleaved
    with pytest.raises(StateError, match="dimension_sections"):
        read_rope(write(file, "qwen2vl", {}), Running(MROPE, 4096))


def test_head_counts_by_layer(file: Path) -> None:
    """The first layer's count gives the head dimension."""
    path = write(file, "openelm", {"attention.head_count": [2, 4, 4, 8]})
    assert read_rope(path, Running(NEOX, 4096)).layers[3].head_dim == 128


def test_numbers_that_do_not_fit(file: Path) -> None:
    with pytest.raises(StateError, match="cannot be rotated"):
        read_rope(write(file, "llama", {"rope.dimension_count": 66}), Running(NORM, 4096))


def test_overridden_base(file: Path) -> None:
    path = write(file, "llama", {"rope.freq_base": 500000.0})
    assert read_rope(path, Running(NORM, 4096)).layers[0].freq_base == 500000.0
    assert read_rope(path, Running(NORM, 4096, freq_base=1e6)).layers[0].freq_base == 1e6


@pytest.mark.parametrize("arch", [*REASONS, "mamba", "baichuan", "something-new"])
def test_architectures_that_are_refused(file: Path, arch: str) -> None:
    """By name: K-norms after the rotation, absolute positions, and everything unknown."""
    with pytest.raises(StateError, match=f"cannot be moved to other positions: {arch} "):
        read_rope(write(file, arch, {}), Running(NORM, 4096))


@pytest.mark.parametrize(
    ("running", "keys", "message"),
    [
        (Running(-1, 4096), {}, "unknown type -1"),
        (Running(24, 4096), {}, "unknown type 24"),
        (Running(NORM, 4096), {"rope.dimension_count_swa": 32}, "sliding-window"),
        (Running(NORM, 4096), {"attention.temperature_scale": 0.1}, "absolute positions"),
        (Running(NORM, 4096), {"block_count": 0}, "no layers"),
    ],
)
def test_models_that_are_refused(
    file: Path, running: Running, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(StateError, match=message):
        read_rope(write(file, "mistral3", keys), running)


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    for path in (bad, tmp_path / "none.gguf", tmp_path / "m-00001-of-00002.gguf"):
        with pytest.raises(StateError, match="not a readable GGUF"):
            read_rope(path, Running(NORM, 4096))


def test_tensors_of_a_split_model(tmp_path: Path) -> None:
    first = write(tmp_path / "m-00001-of-00002.gguf", "llama", {})
    write(tmp_path / "m-00002-of-00002.gguf", "llama", {}, rope_freqs=[2.0] * 32)
    assert read_rope(first, Running(NORM, 4096)).layers[0].factors == (2.0,) * 32


def test_no_architecture_is_in_two_tables() -> None:
    assert not PLAIN & WITH_FACTORS
    assert not (PLAIN | WITH_FACTORS) & set(REASONS)
    assert set(WINDOWED) <= PLAIN | WITH_FACTORS
    assert FULL_FACTORS <= WITH_FACTORS & set(WINDOWED)
    assert set(WINDOWED) >= OWN_N_ROT


def test_a_written_model_reads_back(file: Path) -> None:
    shape = Shape(2, 128, 2, 1, 128, 448, ftype="F32", rope_scaling="llama3")
    make_random_gguf(file, shape)
    layer = read_rope(file, Running(NORM, 4096)).layers[0]
    assert layer.freq_base == shape.rope_freq_base
    assert layer.factors is not None
    assert layer.factors[0] == 1.0
    assert layer.factors[-1] == 8.0
