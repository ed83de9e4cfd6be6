"""The row identity: everything that must match before cached rows may be reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

from towerd.slots.errors import StateError
from towerd.slots.layout import STATE_VERSION, KVLayout

RopeValue: TypeAlias = float | str
RANGE = 1e300
REPORTED_HASH_PREFIX = "props:"
"""Prefix of a row identity's `model_hash` if the model's file could not be read: the rest is a hash
of what its server reports."""


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """Everything that a row depends on besides its tokens; equal row identities may share rows.

    Raises StateError for values of the wrong type (integers in `rope` become floats)."""

    model_hash: str
    """Hash of the model file's bytes."""
    arch: str
    tokenizer: str
    """Hash or name that changes when ids mean other text."""
    rope: Mapping[str, RopeValue]
    """The RoPE parameters in force, overrides applied; finite floats and strings."""
    lora: tuple[str, ...]
    """Adapters in force, each with its scale, in order."""
    layout: KVLayout
    rot_k: bool
    """K rows are stored Hadamard-rotated."""
    rot_v: bool
    long_context: bool
    """n_ctx_seq > n_ctx_orig: the long RoPE factors are in force."""
    format_version: int = STATE_VERSION

    def __post_init__(self) -> None:
        for name in ("model_hash", "arch", "tokenizer"):
            if not isinstance(getattr(self, name), str):
                raise StateError(f"row identity: {name} must be a string")
        for name in ("rot_k", "rot_v", "long_context"):
            if not isinstance(getattr(self, name), bool):
                raise StateError(f"row identity: {name} must be true or false")
        if type(self.format_version) is not int:
            raise StateError("row identity: format_version must be an integer")
        if not isinstance(self.layout, KVLayout):
            raise StateError("row identity: layout must be a KVLayout")
        _check_names(self.lora)
        object.__setattr__(self, "rope", MappingProxyType(_checked_rope(self.rope)))

    def __hash__(self) -> int:
        return hash(self.digest())

    def digest(self) -> bytes:
        """32 bytes: BLAKE2b-256 of the canonical JSON (sorted keys, no spaces, ASCII)."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.blake2b(text.encode("ascii"), digest_size=32).digest()

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` takes it back."""
        value: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return value | {
            "rope": dict(self.rope),
            "lora": list(self.lora),
            "layout": self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> RowIdentity:
        """The row identity that `to_json` described. Raises StateError for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise StateError(f"a row identity must be an object with exactly {sorted(names)}")
        if not isinstance(value["lora"], list | tuple):
            raise StateError("row identity: lora must be a list")
        layout = KVLayout.from_json(value["layout"])
        return cls(**{**value, "lora": tuple(value["lora"]), "layout": layout})


def _check_names(lora: object) -> None:
    if not isinstance(lora, tuple) or not all(isinstance(name, str) for name in lora):
        raise StateError("row identity: lora must be a tuple of strings")


def _checked_rope(rope: object) -> dict[str, RopeValue]:
    if not isinstance(rope, Mapping):
        raise StateError("row identity: rope must be a mapping")
    checked: dict[str, RopeValue] = {}
    for key, value in rope.items():
        if not isinstance(key, str) or isinstance(value, bool):
            raise StateError("row identity: rope must map names to numbers or strings")
        if isinstance(value, str):
            checked[key] = value
        elif isinstance(value, int | float) and abs(value) <= RANGE:  # also refuses nan
            checked[key] = float(value)
        else:
            raise StateError(f"row identity: rope {key} must be a finite number or a string")
    return dict(sorted(checked.items()))


def tokenizer_hash(pieces: Iterable[bytes]) -> str:
    """The row identity's `tokenizer`: a hash of every token's bytes, special tokens as text."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()
