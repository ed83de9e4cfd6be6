"""An image projector with random weights, for a text model of any width, and pictures for it."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

N_EMBD, N_FF, N_HEAD, PATCH, SIDE, MERGE = 32, 64, 4, 16, 64, 2
N_PATCHES = (SIDE // PATCH) ** 2
TOKENS_AN_IMAGE = N_PATCHES // MERGE**2


def make_projector(path: Path, n_embd_text: int, seed: int = 0) -> None:
    """Write a one-layer vision tower of the Gemma 3 kind. An image becomes TOKENS_AN_IMAGE."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    writer.add_bool("clip.use_gelu", True)
    figures = {
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "block_count": 1,
        "projection_dim": n_embd_text,
        "image_size": SIDE,
        "patch_size": PATCH,
        "attention.head_count": N_HEAD,
        "projector.scale_factor": MERGE,
    }
    for name, value in figures.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5] * 3)

    def matrix(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def vector(name: str, n: int, value: float) -> None:
        writer.add_tensor(name, np.full(n, value, np.float32))

    matrix("v.patch_embd", N_EMBD, 3, PATCH, PATCH)
    matrix("v.position_embd", N_PATCHES, N_EMBD)
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        matrix(f"v.blk.0.{name}", N_EMBD, N_EMBD)
        vector(f"v.blk.0.{name}.bias", N_EMBD, 0.0)
    matrix("v.blk.0.ffn_up", N_FF, N_EMBD)
    vector("v.blk.0.ffn_up.bias", N_FF, 0.0)
    matrix("v.blk.0.ffn_down", N_EMBD, N_FF)
    vector("v.blk.0.ffn_down.bias", N_EMBD, 0.0)
    for name in ("v.blk.0.ln1", "v.blk.0.ln2", "v.post_ln"):
        vector(f"{name}.weight", N_EMBD, 1.0)
        vector(f"{name}.bias", N_EMBD, 0.0)
    matrix("mm.input_projection", N_EMBD, n_embd_text)
    vector("mm.soft_emb_norm.weight", N_EMBD, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def picture(seed: int) -> str:
    """A PNG of coloured blocks, in base64."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    pixels = blocks.repeat(SIDE // 4, 0).repeat(SIDE // 4, 1)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    png = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + png).decode()
