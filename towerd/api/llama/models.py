"""GET /v1/models."""

from __future__ import annotations

import time
from typing import Any

from towerd.engine.base import Engine, ModelInfo


def ftype(info: ModelInfo) -> str:
    """The file type as llama.cpp names it, at the end of its model description."""
    words = info.description.split(" ", 2)
    return words[2] if len(words) == 3 else info.description


def models_json(engine: Engine) -> dict[str, Any]:
    """llama-server's answer, which combines Ollama's and OpenAI's."""
    info = engine.info
    return {
        "models": [
            {
                "name": info.alias,
                "model": info.alias,
                "modified_at": "",
                "size": "",
                "digest": "",
                "type": "model",
                "description": "",
                "tags": [""],
                "capabilities": ["completion", *(["multimodal"] if info.has_media else [])],
                "parameters": "",
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": "",
                    "families": [""],
                    "parameter_size": "",
                    "quantization_level": "",
                },
            }
        ],
        "object": "list",
        "data": [_model_json(engine)],
    }


def _model_json(engine: Engine) -> dict[str, Any]:
    info = engine.info
    return {
        "id": info.alias,
        "aliases": list(info.aliases or (info.alias,)),
        "tags": list(info.tags),
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": info.vocab_type,
            "n_vocab": info.n_vocab,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size_bytes,
            "ftype": ftype(info),
        },
    }
