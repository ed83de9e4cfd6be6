"""Shape: the size and architecture of a random-weight model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from towerd.errors import ModelError

FType: TypeAlias = Literal["F32", "F16", "Q8_0"]
Arch: TypeAlias = Literal[
    "llama",
    "qwen3",
    "phi3",
    "stablelm",
    "gptneox",
    "smollm3",
    "qwen2vl",
    "qwen3vl",
    "deepseek2",
    "gemma3",
    "gpt-oss",
    "cohere2",
    "mamba",
    "rwkv7",
    "lfm2",
    "granitehybrid",
    "jamba",
    "falcon-h1",
    "qwen35",
    "glm4moe",
]
Scaling: TypeAlias = Literal["none", "linear", "yarn", "llama3", "longrope"]
Guesses: TypeAlias = Literal["random", "right", "of rows"]

PARTIAL = {"stablelm": 4, "gptneox": 4, "deepseek2": 2, "qwen35": 4}
"""Architectures that rotate only one N-th of a head's elements."""
FACTOR_ARCHS = {"llama3": ("llama",), "longrope": ("llama", "phi3")}
"""The architectures that read the tensor of frequency factors that a scaling needs."""
HEADED = ("qwen35", "glm4moe")
"""Architectures that can have a head that predicts a further token (MTP)."""
UNROTATED = ("mamba", "rwkv7", "jamba")
"""Architectures without RoPE."""


def _check_word(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ModelError(f"The {what} must be one of {', '.join(known)}.")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape. `head_dim` None is n_embd / n_head. Raises ModelError if invalid."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    head_dim: int | None = None
    n_ctx_train: int = 131072
    rope_freq_base: float = 500000.0
    ftype: FType = "Q8_0"
    arch: Arch = "llama"
    rope_scaling: Scaling = "none"
    window: int = 128
    """Positions that a sliding-window layer sees, in architectures that have such layers."""
    n_mtp: int = 0
    """Heads that predict a further token (MTP), each a layer behind the `n_layer` ones."""
    guesses: Guesses = "random"
    """What a head guesses. Unless it is `random`, the model says one word of its vocabulary after the
    other, so that a guess can be right: `right` always is, `of rows` where the head has rows of some
    thousand tokens before, and not where it has only a few."""

    def __post_init__(self) -> None:
        counts = (self.n_layer, self.n_embd, self.n_head, self.n_head_kv, self.n_ff)
        if min(counts) < 1 or self.n_ctx_train < 1:
            raise ModelError("Every dimension of a model must be at least 1.")
        if self.n_head % self.n_head_kv:
            raise ModelError("The KV heads must divide the heads.")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ModelError("The heads must divide the embedding, or give the head dimension.")
        if self.head_size % 2:
            raise ModelError("The head dimension must be even: RoPE rotates pairs.")
        _check_word("file type", self.ftype, get_args(FType))
        _check_word("architecture", self.arch, get_args(Arch))
        _check_word("RoPE scaling", self.rope_scaling, get_args(Scaling))
        if self.arch not in FACTOR_ARCHS.get(self.rope_scaling, (self.arch,)):
            raise ModelError(f"{self.arch} reads no frequency factors for {self.rope_scaling}.")
        if self.arch in UNROTATED and self.rope_scaling != "none":
            raise ModelError(f"{self.arch} has no RoPE to scale.")
        _check_word("guesses", self.guesses, get_args(Guesses))
        if self.n_mtp not in (0, 1) or self.n_mtp and self.arch not in HEADED:
            raise ModelError(f"{' and '.join(HEADED)} can have one MTP head, others none.")
        if self.guesses != "random" and not self.n_mtp:
            raise ModelError("What is guessed can be chosen of a model with an MTP head.")
        if self.window < 1:
            raise ModelError("A sliding window must hold at least one position.")
        self._check_rows()

    def _check_rows(self) -> None:
        if self.head_size % (2 * PARTIAL.get(self.arch, 1)):
            raise ModelError(f"{self.arch} rotates pairs of a part of the head: it is too small.")
        fixed = (  # llama.cpp assumes it for these
            "phi3",
            "stablelm",
            "gptneox",
            "qwen2vl",
            "cohere2",
            "jamba",
            "lfm2",
            "rwkv7",
        )
        if self.arch in fixed and self.n_head * self.head_size != self.n_embd:
            raise ModelError(f"The heads of {self.arch} must fill the embedding.")
        if self.arch == "rwkv7" and self.n_embd % 64:
            raise ModelError("The embedding of rwkv7 must be whole heads of 64.")
        block = GGML_QUANT_SIZES[self.matrix_type][0]
        if any(n % block for n in (self.n_embd, self.n_ff, self.n_head * self.head_size)):
            raise ModelError(f"{self.ftype} needs row lengths that are multiples of {block}.")
        if self.arch == "deepseek2" and (self.head_size // 2) % block:
            raise ModelError(f"{self.ftype} needs half-heads that are multiples of {block}.")

    @property
    def head_size(self) -> int:
        """Values per head."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def n_rot(self) -> int:
        """Values per head that RoPE rotates."""
        return self.head_size // PARTIAL.get(self.arch, 1)

    @property
    def matrix_type(self) -> GGMLQuantizationType:
        """How matrices are stored; norms are always float32."""
        return GGMLQuantizationType[self.ftype]


PRESETS = {
    "tiny": Shape(4, 256, 4, 2, 512, 512, n_ctx_train=8192, ftype="F32"),
    "small": Shape(12, 768, 12, 4, 2304, 8192, n_ctx_train=32768),
    "1b": Shape(16, 2048, 32, 8, 8192, 32000),
}
