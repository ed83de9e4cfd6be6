"""Image projectors with random weights, for a text model of any width, and pictures for them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from gguf import GGUFWriter

from lab.models.gguf_file import writing

Kind: TypeAlias = Literal["gemma3", "qwen2vl", "qwen3vl"]
"""Gemma 3 scales each picture to one size, and its tokens have a position each. Those of Qwen-VL keep
a picture's proportions, and its tokens share a position (M-RoPE)."""
DEEP_STACK = 3
"""How many layers of Qwen3-VL take features of the projector, beside its input."""
MERGE = 2
"""Patches side by side, in each direction, that become one token."""
_NAMES = {"gemma3": "gemma3", "qwen2vl": "qwen2vl_merger", "qwen3vl": "qwen3vl_merger"}


@dataclass(frozen=True, slots=True)
class Tower:
    """The sizes of a vision tower. `side`: pixels of the pictures that positions are learned for."""

    n_embd: int = 32
    n_ff: int = 64
    n_head: int = 2
    n_layer: int = DEEP_STACK
    patch: int = 16
    side: int = 64

    @property
    def n_patches(self) -> int:
        """Patches of a picture of `side` by `side` pixels."""
        return (self.side // self.patch) ** 2


TINY = Tower()
SIDE = TINY.side
TOKENS_AN_IMAGE = TINY.n_patches // MERGE**2
"""Of the Gemma 3 kind with the tiny tower."""


def grid(width: int, height: int, tower: Tower = TINY) -> tuple[int, int]:
    """(columns, rows) of the tokens of a picture in pixels, for the kinds of Qwen-VL. Both sides must be
    whole tokens, and the picture have at least 8 tokens, so that it is not resized."""
    token = tower.patch * MERGE
    assert width % token == height % token == 0
    assert width * height >= 8 * token**2
    return width // token, height // token


def make_projector(
    path: Path,
    n_embd_text: int,
    seed: int = 0,
    *,
    kind: Kind = "gemma3",
    tower: Tower = TINY,
) -> None:
    """Write a projector for a text model whose embedding has `n_embd_text` values. The same arguments
    give the same bytes."""
    rng = np.random.default_rng(seed)
    with writing(path, "clip") as writer:
        _add_metadata(writer, kind, tower, n_embd_text)

        def matrix(name: str, *shape: int) -> None:
            values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            writer.add_tensor(name, values)

        def vector(name: str, n: int, value: float = 0.0) -> None:
            writer.add_tensor(name, np.full(n, value, np.float32))

        weights = _Weights(matrix, vector)
        weights.embedding(kind, tower)
        for layer in range(tower.n_layer):
            weights.layer(kind, tower, layer)
        weights.norm("v.post_ln", tower.n_embd)
        weights.projection(kind, tower, n_embd_text)


def _add_metadata(writer: GGUFWriter, kind: Kind, tower: Tower, n_embd_text: int) -> None:
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", _NAMES[kind])
    writer.add_bool("clip.use_gelu", True)
    figures = {
        "embedding_length": tower.n_embd,
        "feed_forward_length": tower.n_ff,
        "block_count": tower.n_layer,
        "projection_dim": n_embd_text,
        "image_size": tower.side,
        "patch_size": tower.patch,
        "attention.head_count": tower.n_head,
        "projector.scale_factor": MERGE,
        "spatial_merge_size": MERGE,
    }
    for name, value in figures.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5] * 3)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Adds tensors: a matrix of some shape, and a vector of some length with one value."""

    matrix: Callable[..., None]
    vector: Callable[..., None]

    def norm(self, name: str, n: int) -> None:
        self.vector(f"{name}.weight", n, 1.0)
        self.vector(f"{name}.bias", n)

    def linear(self, name: str, n_out: int, n_in: int) -> None:
        self.matrix(f"{name}.weight", n_out, n_in)
        self.vector(f"{name}.bias", n_out)

    def embedding(self, kind: Kind, tower: Tower) -> None:
        """Of patches. Qwen-VL has a second one, for the next picture of a video."""
        n = tower.n_embd
        self.matrix("v.patch_embd.weight", n, 3, tower.patch, tower.patch)
        if kind != "gemma3":
            self.matrix("v.patch_embd.weight.1", n, 3, tower.patch, tower.patch)
        if kind == "qwen3vl":
            self.vector("v.patch_embd.bias", n)
        if kind != "qwen2vl":
            self.matrix("v.position_embd.weight", tower.n_patches, n)

    def layer(self, kind: Kind, tower: Tower, layer: int) -> None:
        """One layer of the tower; in Qwen3-VL with the features that it gives to the text model."""
        n, block = tower.n_embd, f"v.blk.{layer}"
        if kind == "qwen3vl":
            self.linear(f"{block}.attn_qkv", 3 * n, n)
        else:
            for name in ("attn_q", "attn_k", "attn_v"):
                self.linear(f"{block}.{name}", n, n)
        self.linear(f"{block}.attn_out", n, n)
        self.linear(f"{block}.ffn_up", tower.n_ff, n)
        self.linear(f"{block}.ffn_down", n, tower.n_ff)
        for name in ("ln1", "ln2"):
            self.norm(f"{block}.{name}", n)

    def projection(self, kind: Kind, tower: Tower, n_embd_text: int) -> None:
        """From the tower's values to the text model's."""
        if kind == "gemma3":
            self.matrix("mm.input_projection.weight", tower.n_embd, n_embd_text)
            self.vector("mm.soft_emb_norm.weight", tower.n_embd, 1.0)
            return
        n = tower.n_embd * MERGE**2
        self.linear("mm.0", n, n)
        self.linear("mm.2", n_embd_text, n)
        for layer in range(DEEP_STACK if kind == "qwen3vl" else 0):
            self.norm(f"v.deepstack.{layer}.norm", n)
            self.linear(f"v.deepstack.{layer}.fc1", n, n)
            self.linear(f"v.deepstack.{layer}.fc2", n_embd_text, n)


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> str:
    """A PNG of coloured blocks, in base64. width, height: pixels, multiples of 16"""
    shape = height // 16, width // 16, 3
    blocks = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    pixels = blocks.repeat(16, 0).repeat(16, 1)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + png).decode()
