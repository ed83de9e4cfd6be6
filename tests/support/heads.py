"""Small models with heads that predict several tokens (MTP), and what they guess.

Layers add nothing to the embeddings, so that the next token follows from the last one alone: the model
says a permutation of its vocabulary. A head that has the same output says the same, and is always right.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from any_arch import COMMON, N_VOCAB, Values, make_arch_gguf

FIRST_WORD = 300
N_EMBD: int = COMMON["embedding_length"]
HEADS: dict[str, dict[str, Any]] = {
    "glm4moe": {},
    "deepseek2": {
        "attention.kv_lora_rank": 32,
        "attention.q_lora_rank": 32,
        "attention.key_length": 48,
        "attention.value_length": 32,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 16,
        "attention.head_count_kv": 1,
    },
    "qwen35": {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 128,
        "ssm.state_size": 32,
        "ssm.time_step_rank": 4,
        "ssm.group_count": 2,
        "full_attention_interval": 2,
        "rope.dimension_sections": [4, 4, 4, 4],
    },
    "step35": {
        "nextn_predict_layers": 2,
        "block_count": 6,
        "attention.sliding_window_pattern": [True, False, True, False, False, False],
    },
}
"""Keys of architectures with heads: dense, MLA, hybrid, and two heads in a chain."""
WINDOWED = {"attention.sliding_window_pattern": [True, False, True, False, True, True]}
"""Keys with which the heads of step35 see a window."""
ATTENTION_GAIN = 20.0
"""Of heads that are led by their rows: about half of what they guess is then another token."""
_ADDS = (".attn_output.", ".ffn_down", ".ssm_out.", ".attn_out.", "shexp")


Guesses: TypeAlias = Literal["of token", "of state", "of rows", "of states", "wrong", "random"]


def make_head_gguf(
    path: Path,
    arch: str,
    guesses: Guesses = "of token",
    seed: int = 0,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A model of `arch` whose head guesses right from the token, right from the hidden state of the token
    before it (one token of a draft, since its own hidden states say less), as its rows of all tokens before
    lead it to, which depend on the tokens alone or ("of states") on hidden states alone, wrong, or by
    chance, from the rows that it has."""
    rng = np.random.default_rng(seed)
    embeddings = rng.standard_normal((N_VOCAB, N_EMBD)).astype(np.float32)
    said, wrong = (_permuted(rng) for _ in range(2))
    guessed = {"of token": said, "of state": said[said], "of rows": said, "of states": said[said]}
    guessed |= {"wrong": wrong, "random": wrong}
    # Out of [embedding, hidden state] one half.
    half = np.eye(N_EMBD, 2 * N_EMBD, N_EMBD if guesses.startswith("of state") else 0, np.float32)

    keys = {"block_count": 5, "nextn_predict_layers": 1} | HEADS[arch] | dict(more)
    first_head = keys["block_count"] - keys["nextn_predict_layers"]

    def changed(name: str, values: Values) -> Values | None:
        if name.endswith(
            "scale"
        ):  # of quantized weights; llama.cpp does not know them in a head it skips
            return None
        if name == "token_embd.weight" or name.endswith("embed_tokens.weight"):
            return embeddings
        if name == "output.weight":
            return embeddings[said]
        if name.endswith("shared_head_head.weight"):
            return embeddings[guessed[guesses]]
        if guesses == "random" and name.startswith(f"blk.{keys['block_count'] - 1}."):
            return values * np.float32(4 if ".attn_output." in name else 1)
        if name.endswith("eh_proj.weight"):
            return half
        if "norm" in name:  # else the head would take some tokens for others
            return np.ones_like(values)
        if (
            guesses in ("of rows", "of states")
            and "attn_output." in name
            and int(name.split(".")[1]) >= first_head
        ):
            return values * np.float32(ATTENTION_GAIN)
        if any(each in name for each in _ADDS):
            return np.zeros_like(values)
        return values

    make_arch_gguf(path, arch, keys, seed, changed)


def _permuted(rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """The vocabulary, its ordinary words in another order."""
    return np.concatenate(
        [np.arange(FIRST_WORD), FIRST_WORD + rng.permutation(N_VOCAB - FIRST_WORD)]
    )
