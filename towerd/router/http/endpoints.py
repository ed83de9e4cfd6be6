"""The endpoints of a model's process that the router passes on. Those of other paths are unknown here,
so that a mistyped path loads no model."""

from __future__ import annotations

GET = (
    "/slots",
    "/lora-adapters",
)
POST = (
    "/completion",
    "/completions",
    "/v1/completions",
    "/chat/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/control",
    "/infill",
    "/responses",
    "/v1/responses",
    "/v1/messages",
    "/embedding",
    "/embeddings",
    "/v1/embeddings",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/chat/completions/input_tokens",
    "/v1/chat/completions/input_tokens",
    "/responses/input_tokens",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/lora-adapters",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/audio/transcriptions",
    "/v1/audio/transcriptions",
    "/props",
    "/slots/{id_slot}",
)
END_WORKFLOW = "/towerd/v1/workflows/{id}/end"
"""Goes to all loaded models: each knows the workflows of its own requests."""
STORE = "/towerd/v1/{path:.*}"
"""towerd's own endpoints, which any model's process answers."""
