"""What `--engine auto` stands for: the embedded engine, unless a llama-server here can do more.

Asking a llama-server for its devices runs it, so nothing here happens unless `auto` was asked for.
"""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from towerd.engine.llama_server.process.binary import build_of, find_binary, library_env
from towerd.errors import ConfigError, TowerdError
from towerd.llama_build import server_path
from towerd.llama_library import lib
from towerd.model.llama_model import LlamaModel, check_reply_flags
from towerd.models.bundled import find_model
from towerd.settings.config import AUTO, UNBOUNDED, Config

log = logging.getLogger(__name__)

_DEVICES_S_MAX = 30.0
_TITLE = "Available devices:"


def chosen(config: Config) -> Config:
    """`config` with the engine that `auto` stands for here, which is logged with the reason; any other
    `config` as it is."""
    if config.engine != AUTO:
        return config
    binary, why = _llama_server(config)
    if binary is None:
        found = _embedded(config)
    else:
        found = replace(config, engine="llama-server", llama_server_bin=binary)
    log.info(f"--engine auto is {found.engine}: {why}")
    return found


def devices(binary: Path) -> list[str]:
    """The devices besides the CPU that a llama-server says it can use; none if it does not say."""
    try:
        done = subprocess.run(
            [str(binary), "--list-devices"],
            env=os.environ | library_env(binary),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEVICES_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    _, title, listed = done.stdout.partition(_TITLE)
    if done.returncode != 0 or not title:
        return []
    lines = (line.strip() for line in listed.splitlines() if line.startswith(" "))
    return [line for line in lines if line and line != "(none)"]


def _llama_server(config: Config) -> tuple[Path | None, str]:
    """The llama-server to take, None for the embedded engine, and why."""
    if config.retention not in UNBOUNDED:
        return None, f"--retention {config.retention} needs it"
    try:
        binary = find_binary(config.llama_server_bin)
        build_of(binary).check(allow_vulnerable=config.allow_vulnerable)
    except ConfigError as error:
        return None, f"there is no other: {error.message}"
    if refusal := _refusal(config):
        return binary, f"the embedded engine refuses what is asked for: {refusal}"
    if config.gpu_layers == 0:
        return None, "no layers go on a GPU (--gpu-layers 0)"
    if lib.llama_supports_gpu_offload():
        return None, "towerd's own llama.cpp is built for a GPU"
    if binary == server_path():
        return None, "the only llama-server here is towerd's own"
    if found := devices(binary):
        names = ", ".join(found)
        return binary, f"{binary} can use {names}, and towerd's own llama.cpp the CPU alone"
    return None, f"{binary} finds no GPU, either"


def _refusal(config: Config) -> str:
    """Why the embedded engine does not take these settings or this model, as far as the model file's
    header says; "" if it does."""
    try:
        own = _embedded(config)
        check_reply_flags(own)
        LlamaModel(find_model(own.model), replace(own, progress_fd=None), vocab_only=True).close()
    except TowerdError as error:
        return error.message
    return ""


def _embedded(config: Config) -> Config:
    """`config` for the embedded engine. Raises ConfigError."""
    return replace(config, engine="embedded", llama_server_bin=None, slot_dir=None)
