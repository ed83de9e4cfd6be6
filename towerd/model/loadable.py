"""Refuses models that cannot be served, by their metadata, before llama.cpp loads the weights.

llama.cpp refuses some of them with a message meant for its own tools. With others it ends the
process (an assertion while it loads), or loads a model that then keeps no memory of a context.
"""

from __future__ import annotations

import re
from pathlib import Path

from towerd.errors import ModelError
from towerd.model.gguf_keys import GgufKeys

_DRAFTS = ("eagle3", "dflash", "gemma4-assistant")
"""Architectures that are no model by themselves."""
_UNSUPPORTED = re.compile(
    r"invalid ggml type|only supports up to version|no longer supported|endian|failed to open"
)
"""What llama.cpp says of a header that is whole."""


def check_loadable(path: Path) -> None:
    """Raises ModelError for a file that is cut short, a projector, a draft model, a model that reads in both
    directions, or latent attention without its RoPE dimensions or with a rank that is none. What ggml cannot read is left to
    llama.cpp."""
    try:
        keys = GgufKeys(path)
    except ValueError:
        return
    try:
        reason = _reason(keys, str(keys.get("general.architecture", "")))
    finally:
        keys.close()
    if reason:
        raise ModelError(f"{path} {reason}.")


def _reason(keys: GgufKeys, arch: str) -> str:
    if shortage := keys.shortage():
        return f"{shortage}; download it again"
    if arch == "clip" or keys.get("general.type") == "mmproj":
        return (
            "is a projector (mmproj), which is not a model by itself: serve its language model, with "
            "--mmproj FILE for images"
        )
    if arch in _DRAFTS:
        return "only drafts for another model, whose hidden states it reads: serve that model"
    if keys.get(f"{arch}.attention.causal") is False:
        return (
            "reads text in both directions (an embedding or diffusion model), so it keeps no "
            "state to continue from: serve a model that generates text from left to right"
        )
    if _lacks_rotated(keys, arch):
        return (
            f"has latent attention but lacks {arch}.rope.dimension_count in its metadata: convert "
            "the model again, or download another conversion"
        )
    return ""


def _lacks_rotated(keys: GgufKeys, arch: str) -> bool:
    """Whether it is said nowhere how many values of a latent row RoPE turns. None is right where rows
    are no longer than the latent part (GLM 5 Next)."""
    n_latent = keys.count(f"{arch}.attention.kv_lora_rank")
    n_rot = keys.get(f"{arch}.rope.dimension_count")
    if n_latent == 0 or keys.count(f"{arch}.rope.dimension_count"):
        return False
    return n_rot is None or keys.count(f"{arch}.attention.key_length") != n_latent


def why_not_loaded(path: Path, complaints: str) -> str:
    """The sentence for a model that llama.cpp refused with these log lines."""
    if found := re.search(r"unsupported model architecture: '([^']*)'", complaints):
        return f"{path} has the architecture {found[1]!r}, which llama.cpp does not run."
    if found := re.search(r"unknown model architecture: '([^']*)'", complaints):
        return (
            f"{path} has the architecture {found[1]!r}, which this llama.cpp does not know: "
            "install a newer one with towerd, or serve another model."
        )
    if found := re.search(r"key not found in model: ([\w.-]+)", complaints):
        return (
            f"{path} lacks {found[1]} in its metadata: convert the model again, or download "
            "another conversion."
        )
    # What llama.cpp logs there is about the file's header alone.
    if "gguf_init_from_" in complaints and not _UNSUPPORTED.search(complaints):
        return f"{path} is damaged, its header cannot be read; download it again."
    return (
        f"llama.cpp cannot load {path}: {complaints or 'no reason given'}; "
        "download the file again or use a GGUF that this build supports."
    )
