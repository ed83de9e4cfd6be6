"""A model that generates a fixed script, token by token, after any prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType

from lab.models.gguf_file import writing

N_EMBD = 64
N_FF = 32
N_CTX_TRAIN = 32768
EOS = 2
FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
"""llama.cpp knows them by their names."""
SHARPNESS = 8.0


def make_scripted_model(
    path: Path,
    script: Sequence[str],
    *,
    fill_in: bool = False,
    pre: str = "",
    controls: Sequence[str] = (),
) -> None:
    """Write a GGUF of the llama architecture that generates `script` after any prompt that does not
    end in a piece of it, and then ends. The pieces are tokens of its vocabulary and must differ.
    fill_in: it has the tokens of infill; pre: it has a BPE tokenizer of that pre-tokenizer, which knows
    the letter a; controls: further control tokens."""
    assert len(set(script)) == len(script) < N_EMBD
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    controls = (*controls, *(FILL_IN if fill_in else ()))
    pieces += controls
    types += [TokenType.CONTROL] * len(controls)
    if pre:
        pieces += ["a", "aa"]
        types += [TokenType.NORMAL] * 2
    n = len(pieces)
    pieces += script
    types += [TokenType.USER_DEFINED] * len(script)
    with writing(path, "llama") as writer:
        _add_metadata(writer, pieces, types, pre)
        _add_tensors(writer, n, len(script))


def _add_metadata(writer: GGUFWriter, pieces: list[str], types: list[TokenType], pre: str) -> None:
    writer.add_name("scripted")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(pieces))
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(1)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD)
    writer.add_tokenizer_model("gpt2" if pre else "llama")
    if pre:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(["a a"])
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _add_tensors(writer: GGUFWriter, n_plain: int, n_script: int) -> None:
    """A layer that adds nothing. Each token of the script has a direction of its own, which is that
    of the next one's logit; all plain tokens share theirs, which is that of the first."""
    embd = np.zeros((n_plain + n_script, N_EMBD), np.float32)
    embd[:n_plain, 0] = 1.0
    embd[np.arange(n_plain, len(embd)), np.arange(1, n_script + 1)] = 1.0
    output = np.zeros_like(embd)
    output[n_plain, 0] = SHARPNESS
    output[np.arange(n_plain + 1, len(embd)), np.arange(1, n_script)] = SHARPNESS
    output[EOS, n_script] = SHARPNESS
    ones, square = np.ones(N_EMBD, np.float32), np.zeros((N_EMBD, N_EMBD), np.float32)
    wide = np.zeros((N_FF, N_EMBD), np.float32)
    tensors = {
        "token_embd": embd, "output": output, "output_norm": ones, "blk.0.attn_norm": ones,
        "blk.0.ffn_norm": ones, "blk.0.attn_q": square, "blk.0.attn_k": square,
        "blk.0.attn_v": square, "blk.0.attn_output": square, "blk.0.ffn_gate": wide,
        "blk.0.ffn_up": wide, "blk.0.ffn_down": np.ascontiguousarray(wide.T),
    }  # fmt: skip
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
