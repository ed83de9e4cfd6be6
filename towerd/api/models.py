"""GET /v1/models, and which `model` names a request may use."""

from __future__ import annotations

import time
from pathlib import PurePath
from typing import Any

from towerd.api import fields
from towerd.api.fields import Body
from towerd.engine.base import Engine, ModelInfo
from towerd.errors import NotFound


def known_names(info: ModelInfo) -> list[str]:
    """The names a client may give this model: alias, path, file name, file stem."""
    path = PurePath(info.path)
    return list(dict.fromkeys((info.alias, path.stem, path.name, info.path)))


def check_model(body: Body, engine: Engine) -> None:
    """Raises NotFound, listing what there is, when the body names another model."""
    name = fields.string(body, "model", "")
    names = known_names(engine.info)
    if name and name not in names:
        shown = name if len(name) <= 100 else name[:100] + "..."
        listed = ", ".join(names[:-1] if len(names) > 1 else names)
        raise NotFound(f"model '{shown}' not found; this server has: {listed}")


def ftype(info: ModelInfo) -> str:
    """The file type in llama.cpp's words: its model description ends with it."""
    words = info.description.split(" ", 2)
    return words[2] if len(words) == 3 else info.description


def models_json(engine: Engine) -> dict[str, Any]:
    """llama-server's answer, which is Ollama's and OpenAI's in one."""
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
                "capabilities": ["completion"],
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
