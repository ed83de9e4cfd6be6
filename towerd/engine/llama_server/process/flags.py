"""towerd's settings as llama-server's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from towerd.models.known import metadata_of
from towerd.settings.config import Config, defaults
from towerd.settings.llama_flags import canonical

OURS = frozenset(
    "--host --port --api-key --api-key-file --slot-save-path --reuse-port"
    " --ssl-key-file --ssl-cert-file --api-prefix".split()
)
"""Flags that towerd needs for itself; a person cannot pass them on."""
OUR_ENV = frozenset(
    "LLAMA_ARG_HOST LLAMA_ARG_PORT LLAMA_API_KEY LLAMA_ARG_API_KEY_FILE LLAMA_ARG_REUSE_PORT"
    " LLAMA_ARG_SSL_KEY_FILE LLAMA_ARG_SSL_CERT_FILE LLAMA_ARG_API_PREFIX AIP_MODE".split()
)
"""Environment variables with the same meaning, and the one by which Vertex AI calls towerd."""
MODEL = frozenset(
    "-m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo --models-dir"
    " --models-preset".split()
)
"""Flags that name a model, or make llama-server a router of several."""
ALIAS = ("-a", "--alias")
"""Flags that llama-server takes all of, instead of only the last one."""
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
    ("pooling", "--pooling"),
)
"""Settings that are passed on when they differ from their default, under this flag."""
_METADATA = {
    "tokenizer.chat_template": "--chat-template",
    "general.sampling.temp": "--temp",
    "general.sampling.top_p": "--top-p",
}
"""Flags for the metadata that towerd replaces in a known model."""


def server_flags(
    config: Config,
    model: Path | None,
    slot_dir: Path,
    port: int,
    *,
    has_window: bool,
    swa_full: bool = False,
) -> list[str]:
    """The whole command line after the binary. What a person wrote after `--` comes last and
    wins, except over `OURS`, which `clashing` finds.

    has_window: the model has sliding-window layers. If slots shared their cells, another one
    could take the row that makes a restored slot reusable, so each gets cells of its own.
    swa_full: keep the window's layers whole, without which llama-server takes no state up again that is
    stored whole"""
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
    if swa_full:
        flags.append("--swa-full")
    if n_cells := config.live_tokens or per_slot:
        flags += ["--ctx-size", str(n_cells)]
    flags += ["--threads", str(config.threads), "--threads-batch", str(config.threads_batch)]
    if not config.mmap:
        flags += ["--load-mode", "mlock" if config.mlock else "none"]
    elif config.mlock:
        flags += ["--load-mode", "mmap+mlock"]
    switches = {
        "--context-shift": config.retention == "shift",
        "--embeddings": config.embeddings,
        "--reranking": config.reranking,
    }
    flags += [flag for flag, is_on in switches.items() if is_on]
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


def _name(flag: str) -> str:
    return canonical(flag.partition("=")[0])
