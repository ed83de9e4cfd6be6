"""Ollama's models: names lead to manifests, and these to GGUFs that are named by their hashes.

manifests/registry.ollama.ai/library/llama3.2/1b     JSON: layers with a media type and a digest
blobs/sha256-...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from towerd.models.local.found import OLLAMA, FoundModel

SYSTEM_DIR = Path("/usr/share/ollama/.ollama/models")
"""Where the service that Ollama's installer sets up on Linux keeps them."""
_OWN = ("registry.ollama.ai/library/", "registry.ollama.ai/")
"""What Ollama leaves out of names."""
_MODEL = "application/vnd.ollama.image.model"
_PROJECTOR = "application/vnd.ollama.image.projector"
_MANIFEST_BYTES_MAX = 2**20


class _Layer(msgspec.Struct):
    media_type: str = msgspec.field(name="mediaType")
    digest: str


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


def folders(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where Ollama keeps its models."""
    if env.get("OLLAMA_MODELS"):
        return [Path(env["OLLAMA_MODELS"]).expanduser()]
    return [Path("~/.ollama/models").expanduser(), SYSTEM_DIR]


def ollama_models(folder: Path) -> Iterator[FoundModel]:
    """The models in `folder`, by name. A manifest that cannot be read, or has no GGUF, is left
    out: Ollama does not list it either."""
    manifests = folder / "manifests"
    with suppress(OSError):
        for path in sorted(manifests.rglob("*")):
            manifest = _read(path)
            if manifest is None:
                continue
            model = _blob(folder, manifest, _MODEL)
            if model is not None:
                name = _name(path.relative_to(manifests))
                projector = _blob(folder, manifest, _PROJECTOR)
                yield FoundModel(name, model, OLLAMA, projector)


def _read(path: Path) -> _Manifest | None:
    try:
        if not path.is_file() or path.stat().st_size > _MANIFEST_BYTES_MAX:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _blob(folder: Path, manifest: _Manifest, media_type: str) -> Path | None:
    digests = (layer.digest for layer in manifest.layers if layer.media_type == media_type)
    for digest in digests:
        path = folder / "blobs" / Path(digest.replace(":", "-")).name
        return path if path.is_file() else None
    return None


def _name(path: Path) -> str:
    """registry.ollama.ai/library/llama3.2/1b -> llama3.2:1b; other registries keep their names."""
    text = path.parent.as_posix()
    for own in _OWN:
        text = text.removeprefix(own)
    return f"{text}:{path.name}"
