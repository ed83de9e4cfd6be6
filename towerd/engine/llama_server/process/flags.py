"""towerd's settings as llama-server's flags, and what in its flags changes cached rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from towerd.models.known import metadata_of
from towerd.settings.config import Config, defaults

OURS = frozenset(
    "--host --port --api-key --api-key-file --slot-save-path --reuse-port"
    " --ssl-key-file --ssl-cert-file --api-prefix".split()
)
"""Flags that towerd needs for itself; a person cannot pass them on."""
OUR_ENV = frozenset(
    "LLAMA_ARG_HOST LLAMA_ARG_PORT LLAMA_API_KEY LLAMA_ARG_API_KEY_FILE LLAMA_ARG_REUSE_PORT"
    " LLAMA_ARG_SSL_KEY_FILE LLAMA_ARG_SSL_CERT_FILE LLAMA_ARG_API_PREFIX".split()
)
"""Environment variables with the same meaning."""
MODEL = frozenset(
    "-m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo --models-dir"
    " --models-preset".split()
)
"""Flags that name a model, or make llama-server a router of several."""
ALIAS = ("-a", "--alias")
"""Flags that llama-server takes all of, instead of only the last one."""
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
_SETTINGS: tuple[tuple[str, str], ...] = (
    ("batch_size", "--batch-size"),
    ("ubatch_size", "--ubatch-size"),
    ("cache_type_k", "--cache-type-k"),
    ("cache_type_v", "--cache-type-v"),
    ("flash_attn", "--flash-attn"),
    ("gpu_layers", "--gpu-layers"),
    ("rope_freq_base", "--rope-freq-base"),
    ("rope_freq_scale", "--rope-freq-scale"),
    ("n_predict", "--predict"),
    ("chat_template", "--chat-template"),
    ("chat_template_file", "--chat-template-file"),
)
"""Settings that are passed on when they differ from their default, under this flag."""
_METADATA = {
    "tokenizer.chat_template": "--chat-template",
    "general.sampling.temp": "--temp",
    "general.sampling.top_p": "--top-p",
}
"""Flags for the metadata that towerd replaces in a known model."""


def server_flags(
    config: Config, model: Path | None, slot_dir: Path, port: int, *, has_window: bool
) -> list[str]:
    """The whole command line after the binary. What a person wrote after `--` comes last and
    wins, except over `OURS`, which `clashing` finds.

    has_window: the model has sliding-window layers. If slots shared their cells, another one
    could take the row that makes a restored slot reusable, so each gets cells of its own."""
    flags = ["--host", "127.0.0.1", "--port", str(port), "--slot-save-path", str(slot_dir)]
    # Its own caches would keep a second copy of what towerd keeps, and clear idle slots.
    flags += ["--cache-ram", "0", "--no-cache-idle-slots", "--slots", "--metrics"]
    if model is not None:
        flags += ["--model", str(model)]
        if not any(_name(flag) in ALIAS for flag in config.llama_server_args):
            flags += ["--alias", config.alias or model.name]
        for key, value in metadata_of(model).items():
            flags += [_METADATA[key], value]
    flags += ["--parallel", str(config.parallel)]
    flags.append("--no-kv-unified" if has_window else "--kv-unified")
    per_slot = config.ctx_size * (config.parallel if has_window else 1)
    if n_cells := config.live_tokens or per_slot:
        flags += ["--ctx-size", str(n_cells)]
    flags += ["--threads", str(config.threads), "--threads-batch", str(config.threads_batch)]
    if not config.mmap:
        flags += ["--load-mode", "mlock" if config.mlock else "none"]
    elif config.mlock:
        flags += ["--load-mode", "mmap+mlock"]
    if config.retention == "shift":
        flags.append("--context-shift")
    standard = defaults()
    for name, flag in _SETTINGS:
        value = getattr(config, name)
        if value != standard[name] and value is not None:
            flags += [flag, str(value)]
    return flags + list(config.llama_server_args)


def server_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without what towerd decides: it may have been set for a llama-server of the user's."""
    return {name: value for name, value in env.items() if name not in OUR_ENV}


def clashing(extra: Sequence[str]) -> list[str]:
    """The flags in `extra` that towerd needs for itself."""
    return [flag for flag in extra if _name(flag) in OURS]


def names_model(extra: Sequence[str]) -> bool:
    """Whether `extra` says which model to load."""
    return any(_name(flag) in MODEL for flag in extra)


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
        name, _, value = item.partition("=")
        if name in _ROPE or name in _OTHER:
            key = _ROPE.get(name) or _OTHER[name]
            found[f"override.{key}"] = _number(value or next(values, ""))
    return found


def _name(flag: str) -> str:
    return flag.partition("=")[0]


def _number(text: str) -> str:
    """Numbers as Python writes floats, as `LlamaModel.rope` does; other text as it is."""
    try:
        return repr(float(text))
    except ValueError:
        return text
