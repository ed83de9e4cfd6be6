"""Heads in files of their own (EAGLE-3, DFlash, DSpark, Gemma 4's assistant), and small models for them.

The models' layers add nothing to the embeddings: each says the words of its vocabulary in a circle, and the
embedding of the next word is that of a word turned by one matrix. A head that turns hidden states so is
always right, if they are those of the right tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from any_arch import COMMON, N_VOCAB, Values, add_keys, make_arch_gguf
from heads import FIRST_WORD, HEADS, make_head_gguf

from lab.models.gguf_file import writing

N_EMBD: int = COMMON["embedding_length"]
N_WORDS = N_VOCAB - FIRST_WORD
MASK = 5
"""The token that DFlash has guessed."""
BACK = 8
"""How many tokens before the one that it guesses the right DFlash head looks."""
N_EMBD_ASSISTANT = 160
"""Of Gemma 4's assistant, which must have another width than its model."""
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen35": {**HEADS["qwen35"], "block_count": 4},
    "gemma4": {
        "attention.sliding_window_pattern": [1, 0, 1, 0],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "rope.freq_base": 1e6,
    },
}
"""Keys of the models, by architecture."""
KINDS: dict[str, dict[str, Any]] = {
    "draft-eagle3": {
        "block_count": 1,
        "target_layers": [0, 2, 3],
        "target_hidden_size": N_EMBD,
    },
    "draft-dflash": {
        "block_count": 1,
        "target_layers": [1, 3],
        "block_size": BACK,
        "attention.head_count_kv": 4,
        "attention.sliding_window": 0,
        "rope.freq_base": 100.0,
    },
    "draft-dspark": {
        "block_count": 1,
        "target_layers": [1],
        "block_size": 4,
        "attention.head_count_kv": 4,
        "attention.sliding_window": 0,
    },
    "draft-mtp": {
        **TARGETS["gemma4"],
        "block_count": 2,
        "nextn_predict_layers": 2,
        "embedding_length": N_EMBD_ASSISTANT,
        "embedding_length_out": N_EMBD,
        "attention.sliding_window_pattern": [1, 0],
    },
}
"""Keys of the heads, by --spec-type."""
ARCHS = {
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "draft-dspark": "dflash",
    "draft-mtp": "gemma4-assistant",
}
_ADDS = (".attn_output.", ".ffn_down", ".ssm_out.")
Guesses: TypeAlias = Literal["right", "random"]
Tensors: TypeAlias = dict[str, npt.NDArray[Any]]


def words(n: int, seed: int) -> list[int]:
    """Tokens of `n` words as a model says them, from any one on."""
    first = int(np.random.default_rng(seed).integers(N_WORDS))
    return [FIRST_WORD + (first + i) % N_WORDS for i in range(n)]


def after(prompt: list[int], n: int) -> list[int]:
    """What a model says behind it."""
    first = prompt[-1] - FIRST_WORD + 1
    return [FIRST_WORD + (first + i) % N_WORDS for i in range(n)]


def make_target(path: Path, arch: str) -> None:
    """Write a model that says the words in a circle."""

    def changed(name: str, values: Values) -> Values:
        if name == "token_embd.weight":
            return _embeddings()
        if name == "output.weight":
            return _said()
        if "norm" in name:
            return np.ones_like(values)
        return np.zeros_like(values) if any(each in name for each in _ADDS) else values

    make_arch_gguf(path, arch, TARGETS[arch], 0, changed)


def make_drafter(
    path: Path,
    kind: str,
    guesses: Guesses = "right",
    seed: int = 0,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    n_vocab: int = N_VOCAB,
    mask: int | None = MASK,
) -> None:
    """Write a head of `kind`. keys, tensors, n_vocab, mask: others than those that belong there."""
    made = {
        "draft-eagle3": _eagle3,
        "draft-dflash": _dflash,
        "draft-dspark": _dspark,
        "draft-mtp": _assistant,
    }[kind]()
    if guesses == "random":
        rng = np.random.default_rng(seed)
        for name, values in made.items():
            gain = 4.0 if ".attn_output" in name else 1.0  # so that it shows which rows are there
            noise = rng.standard_normal(values.shape) * gain * values.shape[-1] ** -0.5
            made[name] = values if values.ndim < 2 else noise.astype(np.float32)
    arch = ARCHS[kind]
    with writing(path, arch) as writer:
        add_keys(writer, arch, {**KINDS[kind], **(keys or {}), "vocab_size": n_vocab})
        if arch == "dflash" and mask is not None:
            writer.add_mask_token_id(mask)
        for name, values in (made | dict(tensors or {})).items():
            writer.add_tensor(name, values)


@dataclass(frozen=True)
class Misfit:
    """A head that was made for another model, or to do harm."""

    model: Path
    flags: tuple[str, ...]
    said: str
    """What is said of it."""


def make_misfits(folder: Path) -> dict[str, Misfit]:
    """Write models and heads for them that must be refused."""
    models = {arch: folder / f"{arch}.model" for arch in ("llama", "gemma4", "glm4moe")}
    for arch, path in models.items():
        make_head_gguf(path, arch) if arch in HEADS else make_target(path, arch)
    found = {}
    for name, (arch, kind, changes, said) in _MISFITS.items():
        make_drafter(folder / name, kind.split()[0], **changes)
        flags = ("-md", str(folder / name), "--spec-type", *kind.split())
        found[name] = Misfit(models[arch], flags, said)
    (folder / "text").write_text("no model")
    narrow = {"block_count": 5, "nextn_predict_layers": 1, "embedding_length": 64}
    make_arch_gguf(folder / "narrow", "glm4moe", narrow)
    with writing(folder / "empty", "llama"):
        pass
    for name, head, kind, said in (
        ("an EAGLE-3 head as MTP", "layer", "draft-mtp", "no head that predicts several tokens"),
        ("an EAGLE-3 head as DFlash", "layer", "draft-dflash", "before layer 9"),
        ("a DFlash head as EAGLE-3", "block", "draft-eagle3", "states of 2 layers"),
        ("text", "text", "draft-eagle3", "cannot be loaded"),
        ("an EAGLE-3 head as a model", "layer", "draft-simple", "is a head, which reads no text"),
        ("nothing", "empty", "", "cannot be loaded"),
    ):
        flags = ("-md", str(folder / head), *(("--spec-type", kind) if kind else ()))
        found[name] = Misfit(models["llama"], flags, said)
    flags = ("-md", str(folder / "narrow"), "--spec-type", "draft-mtp")
    found["narrow"] = Misfit(models["glm4moe"], flags, "of 64 numbers, the model's have 128")
    alone = ("--spec-type", "draft-eagle3")
    found["none"] = Misfit(models["llama"], alone, "name its file with --model-draft")
    return found


_ROWS = np.zeros((N_VOCAB, N_EMBD), np.float32)
_MISFITS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "layer": ("llama", "draft-eagle3", {"keys": {"target_layers": [0, 2, 9]}}, "before layer 9"),
    "no layer": ("llama", "draft-eagle3", {"keys": {"target_layers": [0, -1, 2]}}, "layer -1"),
    "width": (
        "llama",
        "draft-eagle3",
        {
            "keys": {"target_hidden_size": 64},
            "tensors": {"fc.weight": np.zeros((N_EMBD, 3 * 64), np.float32)},
        },
        "hidden states of 64 numbers, the model's have 128",
    ),
    "rows": (
        "llama",
        "draft-eagle3",
        {"tensors": {"token_embd.weight": _ROWS[:10]}},
        "embeddings of 10 tokens, the model has 448",
    ),
    "named": (
        "llama",
        "draft-eagle3",
        {"tensors": {"d2t": np.array([1, 2, 1 << 40]), "output.weight": _ROWS[:3]}},
        "drafts tokens that the model does not have",
    ),
    "vocabulary": ("llama", "draft-eagle3", {"n_vocab": 600}, "has 600 tokens, the model 448"),
    "states": ("glm4moe", "draft-eagle3", {}, "hands out no hidden states"),
    "block": ("llama", "draft-dflash", {"keys": {"block_size": 1}}, "of less than 2 tokens"),
    "blocks": ("llama", "draft-dflash", {"keys": {"target_layers": [1, 7]}}, "before layer 7"),
    "large": (
        "llama",
        "draft-dflash --spec-draft-n-max 999",
        {"keys": {"block_size": 4096}},
        "evaluates 1000 tokens at once",
    ),
    "mask": ("llama", "draft-dflash", {"mask": None}, "names no mask token"),
    "masked": ("llama", "draft-dflash", {"mask": 5000}, "names no mask token"),
    "markov": ("llama", "draft-dspark", {"n_vocab": 600}, "cannot be loaded"),
    "assistant": ("llama", "draft-mtp", {}, "is made for Gemma 4"),
    "heads": (
        "gemma4",
        "draft-mtp",
        {"keys": {"attention.head_count_kv": 1}},
        "has another attention.head_count_kv than the model",
    ),
    "values": (
        "gemma4",
        "draft-mtp",
        {"keys": {"attention.sliding_window_pattern": [1, 1], "attention.key_length_swa": 64}},
        "cannot be loaded",
    ),
}
"""By name: the model's architecture, the kind of head, what is other than it should be, what is said."""


def _embeddings() -> Values:
    """float32[N_VOCAB, N_EMBD]: unit variance, the same first number, and the words on a circle."""
    rng = np.random.default_rng(0)
    made = rng.standard_normal((N_VOCAB, N_EMBD))
    angles = np.outer(np.arange(N_WORDS), 2 * np.pi * _speeds() / N_WORDS)
    circle = np.sqrt(2) * np.stack([np.cos(angles), np.sin(angles)], -1)
    made[FIRST_WORD:, 1:-1] = circle.reshape(N_WORDS, -1)
    made[FIRST_WORD:, -1] = 0
    made[MASK] = 0
    made[:, 0] = np.sqrt(2)
    return made.astype(np.float32)


def _speeds() -> npt.NDArray[np.int64]:
    """How often each plane turns in a circle of words."""
    return 1 + np.random.default_rng(1).permutation(N_WORDS // 2 - 1)[: N_EMBD // 2 - 1]


def _turn(n: int) -> Values:
    """float32[N_EMBD, N_EMBD]: makes the embedding of a word that of the `n`-th after it, without the first
    number."""
    made = np.zeros((N_EMBD, N_EMBD))
    for i, speed in enumerate(_speeds()):
        angle = 2 * np.pi * speed * n / N_WORDS
        at = slice(1 + 2 * i, 3 + 2 * i)
        made[at, at] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return made.astype(np.float32)


def _said() -> Values:
    """Of the output: after each word the next one."""
    made = _embeddings() * np.float32(0.01)
    circle = _embeddings()[FIRST_WORD:]
    made[FIRST_WORD:] = np.roll(circle, 1, 0)
    return made


def _layer(n_kv: int, n_inputs: int) -> Tensors:
    """A layer that adds nothing."""
    ones, square = np.ones(N_EMBD, np.float32), np.eye(N_EMBD, dtype=np.float32)
    return {
        "output_norm.weight": ones,
        "blk.0.attn_norm.weight": ones,
        "blk.0.ffn_norm.weight": ones,
        "blk.0.attn_q.weight": np.zeros((N_EMBD, n_inputs), np.float32),
        "blk.0.attn_k.weight": np.zeros((n_kv, n_inputs), np.float32),
        "blk.0.attn_v.weight": np.zeros((n_kv, n_inputs), np.float32),
        "blk.0.attn_output.weight": np.zeros_like(square),
        "blk.0.ffn_gate.weight": np.zeros_like(square),
        "blk.0.ffn_up.weight": np.zeros_like(square),
        "blk.0.ffn_down.weight": np.zeros_like(square),
    }


def _eagle3() -> Tensors:
    """Turns the hidden state by one word. The gate is a constant, so that its layer computes a matrix."""
    square, gate = np.eye(N_EMBD, dtype=np.float32), 10.0
    made = _layer(2 * 32, 2 * N_EMBD)
    made["blk.0.attn_norm_2.weight"] = np.ones(N_EMBD, np.float32)
    made["fc.weight"] = np.concatenate([square / np.float32(3)] * 3, 1)
    made["blk.0.ffn_gate.weight"][:, 0] = gate / np.sqrt(2)
    turned = _turn(1) - square
    turned[0], turned[-1] = 0, 0
    made["blk.0.ffn_up.weight"] = turned
    made["blk.0.ffn_down.weight"] = square * np.float32((1 + np.exp(-gate)) / gate)
    return made


def _dflash() -> Tensors:
    """Each guess looks at the token that is BACK before it, and turns its state to the one before it."""
    square, half = np.eye(N_EMBD, dtype=np.float32), np.float32(0.5)
    made = _layer(N_EMBD, N_EMBD)
    made["fc.weight"] = np.concatenate([square * half, square * half], 1)
    made["enc.output_norm.weight"] = np.ones(N_EMBD, np.float32)
    angles = BACK * 100.0 ** (-np.arange(16) / 16)
    key = np.concatenate([np.ones(16), np.zeros(16)])
    query = np.concatenate([np.cos(angles), -np.sin(angles)])
    made["blk.0.attn_k.weight"][:, 0] = np.tile(key, 4)
    made["blk.0.attn_q.weight"][:, 0] = np.tile(query, 4)
    for name in ("q", "k"):
        made[f"blk.0.attn_{name}_norm.weight"] = np.full(32, 12, np.float32)
    made["blk.0.attn_v.weight"] = square
    made["blk.0.attn_output.weight"] = _turn(BACK - 1)
    return made


def _dspark() -> Tensors:
    """Guesses each token from the one before."""
    made = _layer(N_EMBD, N_EMBD)
    made["fc.weight"] = np.eye(N_EMBD, dtype=np.float32)
    made["enc.output_norm.weight"] = np.ones(N_EMBD, np.float32)
    for name in ("q", "k"):
        made[f"blk.0.attn_{name}_norm.weight"] = np.ones(32, np.float32)
    made["markov_w1.weight"], made["markov_w2.weight"] = _embeddings(), _said()
    return made


def _assistant() -> Tensors:
    """Turns the hidden state of the token before the newest one, which has the state's width, by one word.

    Its layers add nothing, but read the model's rows."""
    n_head, n, n_ff = 4, N_EMBD_ASSISTANT, COMMON["feed_forward_length"]
    ones = np.ones(n, np.float32)
    wide = np.zeros((n, N_EMBD), np.float32)
    wide[:N_EMBD] = np.eye(N_EMBD)
    turned = _turn(1)
    turned[0, 0] = 1
    made: Tensors = {
        "token_embd.weight": (wide @ _said().T).T.copy(),
        "output_norm.weight": ones,
        "rope_freqs.weight": np.ones(32, np.float32),
        "nextn.pre_projection.weight": np.concatenate([np.zeros_like(wide), wide @ turned], 1),
        "nextn.post_projection.weight": wide.T.copy(),
    }
    for i, n_head_dims in enumerate((32, 64)):
        made |= {
            f"blk.{i}.attn_norm.weight": ones,
            f"blk.{i}.attn_q.weight": np.zeros((n_head * n_head_dims, n), np.float32),
            f"blk.{i}.attn_output.weight": np.zeros((n, n_head * n_head_dims), np.float32),
            f"blk.{i}.attn_q_norm.weight": np.ones(n_head_dims, np.float32),
            f"blk.{i}.post_attention_norm.weight": ones,
            f"blk.{i}.layer_output_scale.weight": np.ones(1, np.float32),
            f"blk.{i}.ffn_norm.weight": ones,
            f"blk.{i}.ffn_gate.weight": np.zeros((n_ff, n), np.float32),
            f"blk.{i}.ffn_up.weight": np.zeros((n_ff, n), np.float32),
            f"blk.{i}.ffn_down.weight": np.zeros((n, n_ff), np.float32),
            f"blk.{i}.post_ffw_norm.weight": ones,
        }
    return made
