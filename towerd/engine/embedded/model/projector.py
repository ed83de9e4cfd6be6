"""Opening the projector that --mmproj names."""

from __future__ import annotations

from pathlib import Path

from towerd.errors import ConfigError, ModelError
from towerd.model.llama_log import last_errors
from towerd.model.llama_model import LlamaModel
from towerd.model.model_file import Memo, file_hash
from towerd.settings.config import Config
from towerd.settings.llama_flags import media_flags
from towerd.wire import Projector, ProjectorOptions


def open_projector(model: LlamaModel, config: Config, memo: Memo) -> Projector | None:
    """What --mmproj names, or None. `memo` remembers the file's hash. Raises ConfigError."""
    flags = media_flags(config.llama_server_args)
    if not flags.path:
        return None
    path = Path(flags.path)
    try:
        digest = f"{file_hash(path, memo)} {flags.image_min_tokens} {flags.image_max_tokens}"
    except ModelError as error:
        raise ConfigError(f"--mmproj: {error}") from error
    options = ProjectorOptions(
        path=str(path),
        digest=digest,
        n_threads=config.threads,
        use_gpu=flags.offload,
        image_min_tokens=flags.image_min_tokens,
        image_max_tokens=flags.image_max_tokens,
        warmup=flags.warmup,
    )
    try:
        projector = Projector(model.address, options.encode())
    except RuntimeError as error:
        raise ConfigError(f"--mmproj: {error}: {last_errors() or 'no reason given'}.") from error
    if projector.uses_mrope:
        raise ConfigError(
            f"--mmproj {path}: pictures of this model have positions of more than one component "
            "(M-RoPE), whose rows this engine does not store: leave --mmproj out, or use "
            "--engine llama-server with -- --mmproj FILE."
        )
    return projector
