"""The routes of the embedded engine, in tables; `docs/http-api.md` has an entry for each. Those in front of a
llama-server are in `towerd.api.relay.routes`, those of a router in `towerd.router.router`."""

from __future__ import annotations

from aiohttp import web

from towerd.api.admin import address, continuing, page, pins, precache, upkeep
from towerd.api.admin import requests as own_requests
from towerd.api.admin import workflows as own_workflows
from towerd.api.llama import (
    completion,
    embeddings,
    info,
    lora,
    mcp_proxy,
    slots,
    streams,
    text,
    unsupported,
)
from towerd.api.ollama import models as ollama_models
from towerd.api.ollama.bodies import CHAT, COMPLETION, INFILL
from towerd.api.ollama.embedding import embedding
from towerd.api.ollama.generation import chatting, generating
from towerd.app.response_routes import RESPONSE_ROUTES
from towerd.app.store_routes import STORE_ROUTES, Route, add_routes

LLAMA_ROUTES: tuple[Route, ...] = (
    Route("GET", "/health", info.get_health),
    Route("GET", "/v1/health", info.get_health),
    Route("GET", "/props", info.get_props),
    Route("GET", "/models", info.get_models),
    Route("GET", "/v1/models", info.get_models),
    Route("GET", "/slots", info.get_slots),
    Route("POST", "/slots/{id_slot}", slots.post_slot),
    Route("GET", "/metrics", info.get_metrics),
    Route("POST", "/completion", completion.post_completion),
    Route("POST", "/completions", completion.post_completion),
    Route("POST", "/v1/completions", completion.post_openai_completion),
    Route("POST", "/chat/completions", completion.post_chat),
    Route("POST", "/v1/chat/completions", completion.post_chat),
    Route("POST", "/infill", completion.post_infill),
    Route("POST", "/responses", completion.post_responses),
    Route("POST", "/v1/responses", completion.post_responses),
    Route("POST", "/v1/messages", completion.post_messages),
    Route("POST", "/v1/chat/completions/control", completion.post_control),
    Route("POST", "/audio/transcriptions", completion.post_transcription),
    Route("POST", "/v1/audio/transcriptions", completion.post_transcription),
    Route("POST", "/embedding", embeddings.post_embeddings),
    Route("POST", "/embeddings", embeddings.post_embeddings),
    Route("POST", "/v1/embeddings", embeddings.post_openai_embeddings),
    Route("POST", "/rerank", embeddings.post_rerank),
    Route("POST", "/reranking", embeddings.post_rerank),
    Route("POST", "/v1/rerank", embeddings.post_rerank),
    Route("POST", "/v1/reranking", embeddings.post_rerank),
    Route("GET", "/cors-proxy", mcp_proxy.forward),
    Route("POST", "/cors-proxy", mcp_proxy.forward),
    Route("POST", "/chat/completions/input_tokens", text.post_chat_tokens),
    Route("POST", "/v1/chat/completions/input_tokens", text.post_chat_tokens),
    Route("POST", "/responses/input_tokens", text.post_responses_tokens),
    Route("POST", "/v1/responses/input_tokens", text.post_responses_tokens),
    Route("POST", "/v1/messages/count_tokens", text.post_messages_tokens),
    Route("GET", "/lora-adapters", lora.get_adapters),
    Route("POST", "/lora-adapters", lora.post_adapters),
    Route("GET", "/v1/stream", streams.get_stream),
    Route("DELETE", "/v1/stream", streams.delete_stream),
    Route("POST", "/v1/streams/lookup", streams.post_lookup),
    Route("POST", "/tokenize", text.post_tokenize),
    Route("POST", "/detokenize", text.post_detokenize),
    Route("POST", "/apply-template", text.post_apply_template),
)

_GENERATING = {
    CHAT: completion.post_chat,
    COMPLETION: completion.post_completion,
    INFILL: completion.post_infill,
}
OLLAMA_ROUTES: tuple[Route, ...] = (
    Route("POST", "/api/chat", chatting(completion.post_chat)),
    Route("POST", "/api/generate", generating(_GENERATING)),
    Route("POST", "/api/embed", embedding(embeddings.post_openai_embeddings, one=False)),
    Route("POST", "/api/embeddings", embedding(embeddings.post_openai_embeddings, one=True)),
    *(Route(*row) for row in ollama_models.ROUTES),
)

OWN_ROUTES: tuple[Route, ...] = (
    *STORE_ROUTES,
    Route("GET", "/towerd/v1/address", address.get_address),
    Route("GET", "/towerd/v1/stats", info.get_stats),
    Route("GET", "/towerd/v1/requests", own_requests.get_requests),
    Route("GET", "/towerd/v1/requests/{id}/why", own_requests.get_why),
    Route("POST", "/towerd/v1/sessions/{id}/chat", continuing.post_chat),
    Route("GET", "/towerd/v1/settings", own_requests.get_settings),
    Route("GET", "/towerd/v1/workflows", own_workflows.list_workflows),
    Route("POST", "/towerd/v1/workflows/{id}/end", own_workflows.post_end),
    Route("GET", "/towerd/v1/bases", pins.list_bases),
    Route("POST", "/towerd/v1/precache", precache.post_precache),
    Route("GET", "/towerd/v1/calibration", upkeep.get_calibration),
    Route("POST", "/towerd/v1/calibration", upkeep.post_calibration),
)

UI_ROUTES: tuple[Route, ...] = (
    Route("GET", "/", page.get_root),
    Route("GET", "/{file:.+[.][a-z0-9]+}", page.get_file),
)

PAGE_ROUTES: tuple[Route, ...] = (
    Route("GET", "/towerd", page.redirect),
    Route("GET", "/towerd/", page.get_explorer),
    Route("GET", "/towerd/page/{name}", page.get_asset),
)

UNSUPPORTED_ROUTES: tuple[Route, ...] = tuple(
    Route(method, path, unsupported.refuse_unsupported) for method, path in unsupported.UNSUPPORTED
) + tuple(Route(*route, unsupported.refuse_disabled) for route in unsupported.DISABLED)

ROUTES = (
    LLAMA_ROUTES
    + RESPONSE_ROUTES
    + OLLAMA_ROUTES
    + OWN_ROUTES
    + PAGE_ROUTES
    + UI_ROUTES
    + UNSUPPORTED_ROUTES
)


def add_upstream_routes(app: web.Application) -> None:
    """Register the routes in front of a llama-server: what towerd does not parse is passed on."""
    from towerd.api.relay import routes as relay_routes

    add_routes(app, OWN_ROUTES)
    add_routes(app, RESPONSE_ROUTES)
    add_routes(app, PAGE_ROUTES)
    add_routes(app, tuple(Route(*row) for row in relay_routes.ROUTES))
    app.router.add_route("*", "/{path:.*}", relay_routes.unknown)
