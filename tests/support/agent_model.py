"""A model for agent programs: it calls a tool once, and answers when the tool has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType

from lab.models.gguf_file import writing
from lab.models.vocabulary import Vocabulary, from_gguf
from towerd.codec.forms.mini import PATH as TOKENIZER

TOOLS_MARK, RESULT_MARK = "<tools>", "<tool_response>"
"""What a template of Qwen's kind writes before the tools, and before a tool's answer."""
N_CTX_TRAIN = 32768
_N_EMBD = 128
_N_FF = 32
_PLAIN, _TOOLS, _RESULT, _CALLS = (_N_EMBD - i for i in (4, 3, 2, 1))
"""Dimensions behind those of the script: a token that is not of it; the two marks; and whether
the reply is a call."""
_STILL = _N_EMBD - 1
"""A dimension of the head that rotation leaves alone."""
_ROPE_BASE = 1e30
_SHARPNESS = 8.0


def make_agent_model(path: Path, call: Sequence[str], answer: Sequence[str]) -> None:
    """Write a GGUF of the llama architecture that generates `call` after a prompt that offers
    tools, and `answer` after any other and after one in which a tool has answered. The pieces
    become tokens of its vocabulary, must differ, and must not end a prompt."""
    script = [*call, *answer]
    assert len(set(script)) == len(script) < _PLAIN
    vocabulary = from_gguf(TOKENIZER)
    with writing(path, "llama") as writer:
        _add_metadata(writer, vocabulary, [TOOLS_MARK, RESULT_MARK, *script])
        for name, values in _tensors(len(vocabulary), len(call), len(answer)).items():
            writer.add_tensor(f"{name}.weight", values)


def _add_metadata(writer: GGUFWriter, vocabulary: Vocabulary, more: list[str]) -> None:
    writer.add_name("agent")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(vocabulary) + len(more))
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(_N_EMBD)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_N_EMBD)
    writer.add_rope_freq_base(_ROPE_BASE)
    added: dict[str, list[object]] = {
        "tokenizer.ggml.tokens": list(more),
        "tokenizer.ggml.token_type": [int(TokenType.USER_DEFINED)] * len(more),
    }
    for field in vocabulary.fields:
        value = field.value
        if field.key in added:
            value = [*value, *added[field.key]]
        writer.add_key_value(field.key, value, field.type, field.item_type)


def _tensors(n_plain: int, n_call: int, n_answer: int) -> dict[str, np.ndarray]:
    """One layer. Each token of the script has a direction of its own, which is that of the next
    one's logit. The last token of a prompt looks for the marks, the result's first, and finds the
    tools: then its reply is a call."""
    n_vocab = n_plain + 2 + n_call + n_answer
    tools, result, first = n_plain, n_plain + 1, n_plain + 2
    embd = np.zeros((n_vocab, _N_EMBD), np.float32)
    embd[:first, _PLAIN] = 1.0
    embd[tools, _TOOLS] = embd[result, _RESULT] = 1.0
    embd[np.arange(first, n_vocab), np.arange(n_call + n_answer)] = 1.0
    output = np.zeros_like(embd)
    output[first, _CALLS] = 2 * _SHARPNESS
    output[first + n_call, _PLAIN] = _SHARPNESS
    for start, n in ((0, n_call), (n_call, n_answer)):
        output[first + np.arange(start + 1, start + n), np.arange(start, start + n - 1)] = (
            _SHARPNESS
        )
        output[_EOS, start + n - 1] = _SHARPNESS
    square = np.zeros((_N_EMBD, _N_EMBD), np.float32)
    query, key, value, out = (square.copy() for _ in range(4))
    query[_STILL, _PLAIN] = 1.0
    key[_STILL, _TOOLS], key[_STILL, _RESULT] = 2.5, 5.0
    value[0, _TOOLS] = 0.125
    out[_CALLS, 0] = 1.0
    ones, wide = np.ones(_N_EMBD, np.float32), np.zeros((_N_FF, _N_EMBD), np.float32)
    return {
        "token_embd": embd, "output": output, "output_norm": ones, "blk.0.attn_norm": ones,
        "blk.0.ffn_norm": ones, "blk.0.attn_q": query, "blk.0.attn_k": key, "blk.0.attn_v": value,
        "blk.0.attn_output": out, "blk.0.ffn_gate": wide, "blk.0.ffn_up": wide,
        "blk.0.ffn_down": np.ascontiguousarray(wide.T),
    }  # fmt: skip


_EOS = 2
"""`<|im_end|>` of the tokenizer."""
