"""`generation_settings`: the sampling parameters as llama-server reports them."""

from __future__ import annotations

import math
import struct
from typing import Any

from towerd.api.sampling import SEED_MASK
from towerd.engine.base import GenerateRequest, SamplingParams

# Fields llama-server reports that this engine holds fixed.
_CHAT = {
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
}
_FLOAT_LOWEST = -3.4028234663852886e38


def f32(value: float) -> float:
    """The value as a 32-bit float sees it, which is what llama-server echoes."""
    if math.isinf(value):
        return value
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(-_FLOAT_LOWEST, value)


def finite(value: float) -> float:
    """JSON has no infinity: the lowest float stands for it, as in llama-server."""
    return _FLOAT_LOWEST if value == -math.inf else value


def numbers_json(sampling: SamplingParams) -> dict[str, Any]:
    """The leading part both forms share."""
    return {
        "seed": sampling.seed & SEED_MASK,
        "temperature": f32(sampling.temperature),
        "dynatemp_range": f32(sampling.dynatemp_range),
        "dynatemp_exponent": f32(sampling.dynatemp_exponent),
        "top_k": sampling.top_k,
        "top_p": f32(sampling.top_p),
        "min_p": f32(sampling.min_p),
        "top_n_sigma": f32(sampling.top_n_sigma),
        "xtc_probability": f32(sampling.xtc_probability),
        "xtc_threshold": f32(sampling.xtc_threshold),
        "typical_p": f32(sampling.typical_p),
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": f32(sampling.repeat_penalty),
        "presence_penalty": f32(sampling.presence_penalty),
        "frequency_penalty": f32(sampling.frequency_penalty),
        "dry_multiplier": f32(sampling.dry_multiplier),
        "dry_base": f32(sampling.dry_base),
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "mirostat": sampling.mirostat,
        "mirostat_tau": f32(sampling.mirostat_tau),
        "mirostat_eta": f32(sampling.mirostat_eta),
        "adaptive_target": -1.0,
        "adaptive_decay": f32(0.9),
    }


def settings_json(
    sampling: SamplingParams,
    request: GenerateRequest | None = None,
    *,
    stream: bool = False,
    timings_per_token: bool = False,
    brief: bool = False,
) -> dict[str, Any]:
    """llama-server's `generation_settings`; `brief` is the form of /props and /slots."""
    n_predict = request.n_predict if request else -1
    out = numbers_json(sampling)
    if not brief:
        out["dry_sequence_breakers"] = list(sampling.dry_sequence_breakers)
        out["stop"] = list(request.stop) if request else []
    out |= {
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": request.n_keep if request else 0,
        "n_discard": 0,
        "ignore_eos": sampling.ignore_eos,
        "stream": stream,
    }
    if not brief:
        out["logit_bias"] = [
            {"bias": None if math.isinf(bias) else f32(bias), "token": token}
            for token, bias in sampling.logit_bias
        ]
    out |= {"n_probs": sampling.n_probs, "min_keep": sampling.min_keep}
    if not brief:
        out |= {
            "grammar": sampling.grammar,
            "grammar_lazy": False,
            "grammar_triggers": [],
            "preserved_tokens": [],
        }
    return (
        out
        | _CHAT
        | {
            "samplers": list(sampling.samplers),
            "speculative.types": "none",
            "timings_per_token": timings_per_token,
            "post_sampling_probs": sampling.post_sampling_probs,
            "backend_sampling": False,
            "lora": [],
        }
    )
