"""What in a llama-server command line changes the rows that a model computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from towerd.settings.llama_flags import canonical

_ROPE = {
    "--rope-scaling": "scaling",
    "--rope-scale": "scale",
    "--rope-freq-base": "freq_base",
    "--rope-freq-scale": "freq_scale",
    "--yarn-orig-ctx": "yarn_orig_ctx",
    "--yarn-ext-factor": "yarn_ext_factor",
    "--yarn-attn-factor": "yarn_attn_factor",
    "--yarn-beta-slow": "yarn_beta_slow",
    "--yarn-beta-fast": "yarn_beta_fast",
}
"""Flags that move the RoPE angles -> their name in the fingerprint."""
_OTHER = {
    "--control-vector": "control_vector",
    "--control-vector-scaled": "control_vector_scaled",
    "--control-vector-layer-range": "control_vector_layers",
    "--override-kv": "override_kv",
}
"""Other flags that change what a row holds."""
_ENV = {
    "LLAMA_ARG_ROPE_SCALING_TYPE": "--rope-scaling",
    "LLAMA_ARG_ROPE_SCALE": "--rope-scale",
    "LLAMA_ARG_ROPE_FREQ_BASE": "--rope-freq-base",
    "LLAMA_ARG_ROPE_FREQ_SCALE": "--rope-freq-scale",
    "LLAMA_ARG_YARN_ORIG_CTX": "--yarn-orig-ctx",
    "LLAMA_ARG_YARN_EXT_FACTOR": "--yarn-ext-factor",
    "LLAMA_ARG_YARN_ATTN_FACTOR": "--yarn-attn-factor",
    "LLAMA_ARG_YARN_BETA_SLOW": "--yarn-beta-slow",
    "LLAMA_ARG_YARN_BETA_FAST": "--yarn-beta-fast",
}


def row_overrides(flags: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Fingerprint entries for everything in a command line and environment that changes rows:
    `override.freq_base` and so on, with the values as text. The settings of `Config` use the
    same names, so an override said in either way gives the same fingerprint."""
    found: dict[str, str] = {}
    for variable, flag in _ENV.items():
        if env.get(variable):
            found[f"override.{_ROPE[flag]}"] = _number(env[variable])
    values = iter(flags)
    for item in values:
        given, _, value = item.partition("=")
        name = canonical(given)
        if name in _ROPE or name in _OTHER:
            key = f"override.{_ROPE.get(name) or _OTHER[name]}"
            text = _number(value or next(values, ""))
            adds = name == "--override-kv" and key in found  # llama.cpp takes all of them
            found[key] = f"{found[key]},{text}" if adds else text
    return found


def _number(text: str) -> str:
    """Numbers as Python writes floats, as `LlamaModel.rope` does; other text as it is."""
    try:
        return repr(float(text))
    except ValueError:
        return text
