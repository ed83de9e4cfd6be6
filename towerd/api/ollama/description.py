"""What /api/tags, /api/show and /api/ps say of a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from towerd.api.ollama.replies import rfc3339
from towerd.codec.errors import UnknownModel
from towerd.codec.models.gguf_header import read_header
from towerd.engine.base import ModelInfo

_TEMPLATE = "tokenizer.chat_template"
_LISTS = re.compile(r"tokenizer\.ggml\.(tokens|merges|scores|token_type)|tokenizer\.chat_template")
"""Keys that are left out: too long to be read by anyone, or said elsewhere."""
_GAP = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")
"""Keys of models that fill in the middle."""
_TOOLS = re.compile(r"\b(tools|tool_calls)\b")
_THINKING = re.compile(r"<think|enable_thinking|reasoning_(content|effort)|<\|channel\|>")
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model as Ollama's API describes it."""

    name: str
    keys: Mapping[str, Any]
    """Metadata of its GGUF."""
    size_bytes: int
    modified_s: float
    """When its file was written; Unix time, 0: it is not on this machine."""
    n_params: int = 0
    """0: not known."""
    n_ctx: int = 0
    """The context that it is served with; 0: it is not loaded."""
    template: str = ""
    has_pictures: bool = False
    gpu_bytes: int | None = None
    """Of its weights in the memory of GPUs; None: not known."""

    def listed(self) -> dict[str, Any]:
        """An entry of /api/tags. Its lengths are those that the model was made with."""
        entry = self._entry() | {"modified_at": rfc3339(self.modified_s)}
        for name in ("context_length", "embedding_length"):
            if length := self.keys.get(f"{self.arch}.{name}"):
                entry["details"][name] = length
        return entry | ({"capabilities": self.capabilities()} if self.keys else {})

    def _entry(self) -> dict[str, Any]:
        """What /api/tags and /api/ps say alike."""
        said = f"{self.name} {self.size_bytes} {self.modified_s}"
        return {
            "name": self.name,
            "model": self.name,
            "size": self.size_bytes,
            "digest": hashlib.sha256(said.encode()).hexdigest(),
            "details": self.details(),
        }

    def running(self, expires_s: float) -> dict[str, Any]:
        """An entry of /api/ps. expires_s: when it will be unloaded, Unix time."""
        entry = self._entry() | {"expires_at": rfc3339(expires_s), "context_length": self.n_ctx}
        if self.gpu_bytes is not None:  # 0 is for Ollama's programs that all of it is in RAM
            entry["size_vram"] = min(self.gpu_bytes, self.size_bytes)
        return entry

    def shown(self) -> dict[str, Any]:
        """The reply of /api/show. What a client may ask for is the context that there is: `num_ctx` changes
        nothing."""
        keys = {key: value for key, value in self.keys.items() if not _LISTS.fullmatch(key)}
        parameters = ""
        if self.n_ctx:
            keys[f"{self.arch}.context_length"] = self.n_ctx
            parameters = f"num_ctx {self.n_ctx}"
        return {
            "license": str(self.keys.get("general.license", "")),
            "modelfile": f"FROM {self.name}",
            "parameters": parameters,
            "template": self.template,
            "details": self.details(),
            "model_info": keys,
            "capabilities": self.capabilities(),
            "modified_at": rfc3339(self.modified_s),
        }

    @property
    def arch(self) -> str:
        return str(self.keys.get("general.architecture", ""))

    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.arch,
            "families": [self.arch],
            "parameter_size": parameter_size(self.n_params)
            or str(self.keys.get("general.size_label", "")),
            "quantization_level": quantization(self.keys.get("general.file_type")),
        }

    def capabilities(self) -> list[str]:
        """In Ollama's words; of tools and thinking its chat template tells."""
        if self.keys.get(f"{self.arch}.pooling_type"):
            return ["embedding"]
        has = {
            "completion": True,
            "vision": self.has_pictures,
            "tools": _TOOLS.search(self.template) is not None,
            "insert": any(self.keys.get(key) is not None for key in _GAP),
            "thinking": _THINKING.search(self.template) is not None,
        }
        return [name for name, it_does in has.items() if it_does]


def of_info(info: ModelInfo, n_ctx: int, template: str) -> DescribedModel:
    """A model that an engine serves, with the template that it uses. Reads when its file was written."""
    modified_s = 0.0
    with suppress(OSError):
        modified_s = Path(info.path).stat().st_mtime
    return DescribedModel(
        info.alias,
        {key: _typed(value) for key, value in info.metadata.items()},
        info.size_bytes,
        modified_s,
        info.n_params,
        n_ctx,
        template,
        info.has_media,
        info.gpu_bytes,
    )


def of_file(
    name: str, path: Path | None, *, n_ctx: int = 0, has_pictures: bool = False
) -> DescribedModel:
    """A model that need not be loaded. Reads the header of its file, unless it was read before; of one that
    cannot be read, or has no file here, only the name is said."""
    status = header = None
    if path is not None:
        with suppress(OSError, ValueError, UnknownModel):
            status = path.stat()
            header = _header_of(path, status.st_size, status.st_mtime_ns)
    if status is None or header is None:
        return DescribedModel(name, {}, 0, 0.0, n_ctx=n_ctx, has_pictures=has_pictures)
    keys, n_params = header
    template = str(keys.get(_TEMPLATE, ""))
    size, modified_s = status.st_size, status.st_mtime
    return DescribedModel(name, keys, size, modified_s, n_params, n_ctx, template, has_pictures)


@lru_cache(maxsize=256)
def _header_of(path: Path, n_bytes: int, modified_ns: int) -> tuple[Mapping[str, Any], int]:
    """The keys, and the number of parameters, 0 if it is not known. Not by llama.cpp's reader, which some files end the process
    of. n_bytes, modified_ns: of the file, so that one that was replaced is read again."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        with memoryview(data) as view:
            header = read_header(view)
    keys = {
        key: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        for key, value in header.keys.items()
        if value is not None
    }
    is_split = keys.get("split.count", 1) not in (0, 1)  # the other tensors are in other files
    return keys, 0 if is_split else sum(prod(each.shape) for each in header.tensors.values())


def parameter_size(n_params: int) -> str:
    """A number of parameters as people say it: 134.5M, 1.2B; empty for 0."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n_params >= unit:
            return f"{n_params / unit:.1f}{letter}"
    return str(n_params) if n_params else ""


def quantization(file_type: Any) -> str:
    """The name of a `general.file_type`, such as Q4_K_M; empty for one without a name."""
    from gguf import LlamaFileType

    try:
        return LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""


def _typed(value: str) -> Any:
    """A value of llama.cpp's metadata, which are all texts, as what it is."""
    if value in ("true", "false"):
        return value == "true"
    if (found := _NUMBER.fullmatch(value)) is None:
        return value
    return float(value) if found[1] or found[2] else int(value)
