"""A sound projector with random weights, for a text model of any width, and sounds for it."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

N_EMBD, N_FF, N_HEAD, N_MEL, N_HIDDEN = 8, 16, 2, 80, 32
N_FRAMES = 3000
"""Of half a minute, to which every sound is filled up."""
STACK = 250
TOKENS_A_SOUND = N_FRAMES // 2 // STACK
RATE = 16000


def make_hearing_projector(path: Path, n_embd_text: int, seed: int = 0) -> None:
    """Write a one-layer Whisper encoder with Ultravox's projector. A sound of less than half a
    minute becomes TOKENS_A_SOUND, with no token before or behind them."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.projector_type", "ultravox")
    figures = {
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "block_count": 1,
        "projection_dim": n_embd_text,
        "num_mel_bins": N_MEL,
        "attention.head_count": N_HEAD,
        "projector.stack_factor": STACK,
    }
    for name, value in figures.items():
        writer.add_uint32(f"clip.audio.{name}", value)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)

    def matrix(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def fill(name: str, value: float, *shape: int) -> None:
        writer.add_tensor(name, np.full(shape, value, np.float32))

    for i, n_in in ((1, N_MEL), (2, N_EMBD)):
        matrix(f"a.conv1d.{i}", N_EMBD, n_in, 3)
        fill(f"a.conv1d.{i}.bias", 0.0, N_EMBD, 1)
    matrix("a.position_embd", N_FRAMES // 2, N_EMBD)
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        matrix(f"a.blk.0.{name}", N_EMBD, N_EMBD)
        if name != "attn_k":
            fill(f"a.blk.0.{name}.bias", 0.0, N_EMBD)
    matrix("a.blk.0.ffn_up", N_FF, N_EMBD)
    fill("a.blk.0.ffn_up.bias", 0.0, N_FF)
    matrix("a.blk.0.ffn_down", N_EMBD, N_FF)
    fill("a.blk.0.ffn_down.bias", 0.0, N_EMBD)
    for name in ("a.blk.0.ln1", "a.blk.0.ln2", "a.post_ln"):
        fill(f"{name}.weight", 1.0, N_EMBD)
        fill(f"{name}.bias", 0.0, N_EMBD)
    fill("mm.a.norm_pre.weight", 1.0, N_EMBD * STACK)
    matrix("mm.a.mlp.1", 2 * N_HIDDEN, N_EMBD * STACK)
    fill("mm.a.norm_mid.weight", 4.0, N_HIDDEN)
    matrix("mm.a.mlp.2", n_embd_text, N_HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sound(seed: int) -> str:
    """A WAV of one second of noise in one loudness or another, in base64."""
    rng = np.random.default_rng(seed)
    loudness = rng.integers(100, 20000, 20).repeat(RATE // 20)
    samples = (rng.uniform(-1, 1, RATE) * loudness).astype("<i2")
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return base64.b64encode(data.getvalue()).decode()
