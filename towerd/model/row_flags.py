"""What changes the rows that a model computes: flags of a llama-server, and the cache types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from towerd.settings.llama_flags import canonical
from towerd.slots.layout import Plane

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
"""Flags that move the RoPE angles -> their name in the row identity."""
_OTHER = {
    "--control-vector": "control_vector",
    "--control-vector-scaled": "control_vector_scaled",
    "--control-vector-layer-range": "control_vector_layers",
    "--override-kv": "override_kv",
}
"""Other flags that change what a row holds."""
_ENV = {f"LLAMA_ARG_{flag[2:].upper().replace('-', '_')}": flag for flag in _ROPE}
_ENV["LLAMA_ARG_ROPE_SCALING_TYPE"] = _ENV.pop("LLAMA_ARG_ROPE_SCALING")


def row_overrides(flags: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Entries of the row identity for everything in a command line and environment that changes rows:
    `override.freq_base` and so on, with the values as text. The settings of `Config` use the
    same names, so an override said in either way gives the same row identity."""
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


def is_rotated(plane: Plane, n_head_kv: int) -> bool:
    """llama.cpp rotates quantized rows whose head size is a multiple of 64."""
    return plane.format.is_quantized and (plane.n_elements // n_head_kv) % 64 == 0


def has_rotation(env: Mapping[str, str]) -> bool:
    """Whether llama.cpp rotates rows in a process of this environment."""
    return env.get("LLAMA_ATTN_ROT_DISABLE", "0") in ("", "0")


@dataclass(frozen=True, slots=True)
class CacheFraming:
    """What the bytes of a whole state depend on, besides the model."""

    type_k: str = "f16"
    type_v: str = "f16"
    v_trans: bool = False
    """Flash attention is off."""
    n_stream: int = 1


def whole_arch(arch: str, framing: CacheFraming, *, is_rotated: bool) -> str:
    """The row identity's `arch` of a model whose state is kept whole: it has no layout that would say
    how the caches are framed."""
    text = f"{arch}:{framing.type_k}:{framing.type_v}:{framing.v_trans:d}"
    if framing.n_stream != 1:
        text += f":s{framing.n_stream}"
    return text if is_rotated else f"{text}:unrotated"


_CACHE_FLAGS = {
    "-ctk": "type_k",
    "--cache-type-k": "type_k",
    "-ctv": "type_v",
    "--cache-type-v": "type_v",
    "-fa": "flash_attn",
    "--flash-attn": "flash_attn",
}
_CACHE_ENV = {
    "LLAMA_ARG_CACHE_TYPE_K": "type_k",
    "LLAMA_ARG_CACHE_TYPE_V": "type_v",
    "LLAMA_ARG_FLASH_ATTN": "flash_attn",
}
_OFF = ("off", "0", "false", "disabled")
"""llama-server's words for no flash attention."""


def cache_framing(flags: Sequence[str], env: Mapping[str, str], n_stream: int) -> CacheFraming:
    """The framing that a llama-server's command line and environment ask for, defaults filled in."""
    found = {name: env[variable] for variable, name in _CACHE_ENV.items() if env.get(variable)}
    values = iter(flags)
    for item in values:
        given, _, value = item.partition("=")
        if (name := _CACHE_FLAGS.get(canonical(given))) is not None:
            found[name] = value or next(values, "")
    v_trans = found.pop("flash_attn", "").lower() in _OFF
    return CacheFraming(**found, v_trans=v_trans, n_stream=n_stream)
