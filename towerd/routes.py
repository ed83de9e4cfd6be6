"""Every route, in one table; `api/README.md` has an entry for each."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api import (
    completion,
    control,
    elsewhere,
    embeddings,
    info,
    lora,
    own_calibration,
    own_segments,
    own_sessions,
    own_transfer,
    own_why,
    own_workflows,
    page,
    pins,
    precache,
    streams,
    text,
    upkeep,
)


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    handler: Handler


LLAMA_ROUTES: tuple[Route, ...] = (
    Route("GET", "/health", info.get_health),
    Route("GET", "/v1/health", info.get_health),
    Route("GET", "/props", info.get_props),
    Route("GET", "/models", info.get_models),
    Route("GET", "/v1/models", info.get_models),
    Route("GET", "/slots", info.get_slots),
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
    Route("POST", "/v1/chat/completions/control", control.post_control),
    Route("POST", "/embedding", embeddings.post_embeddings),
    Route("POST", "/embeddings", embeddings.post_embeddings),
    Route("POST", "/v1/embeddings", embeddings.post_openai_embeddings),
    Route("POST", "/rerank", embeddings.post_rerank),
    Route("POST", "/reranking", embeddings.post_rerank),
    Route("POST", "/v1/rerank", embeddings.post_rerank),
    Route("POST", "/v1/reranking", embeddings.post_rerank),
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

OWN_ROUTES: tuple[Route, ...] = (
    Route("GET", "/towerd/v1/stats", upkeep.get_stats),
    Route("GET", "/towerd/v1/sessions", own_sessions.list_sessions),
    Route("GET", "/towerd/v1/sessions/{id}", own_sessions.get_session),
    Route("PATCH", "/towerd/v1/sessions/{id}", own_sessions.patch_session),
    Route("DELETE", "/towerd/v1/sessions/{id}", own_sessions.delete_session),
    Route("POST", "/towerd/v1/sessions/{id}/freeze", own_sessions.post_freeze),
    Route("POST", "/towerd/v1/sessions/{id}/thaw", own_sessions.post_thaw),
    Route("GET", "/towerd/v1/sessions/{id}/export", own_transfer.get_export),
    Route("POST", "/towerd/v1/sessions/import", own_transfer.post_import),
    Route("GET", "/towerd/v1/segments", own_segments.list_segments),
    Route("GET", "/towerd/v1/segments/{id}", own_segments.get_segment),
    Route("GET", "/towerd/v1/segments/{id}/why", own_why.get_why),
    Route("GET", "/towerd/v1/trie", own_segments.get_trie),
    Route("GET", "/towerd/v1/workflows", own_workflows.list_workflows),
    Route("POST", "/towerd/v1/workflows/{id}/end", own_workflows.post_end),
    Route("GET", "/towerd/v1/pins", pins.list_pins),
    Route("POST", "/towerd/v1/pins", pins.post_pin),
    Route("DELETE", "/towerd/v1/pins/{id}", pins.delete_pin),
    Route("GET", "/towerd/v1/bases", pins.list_bases),
    Route("DELETE", "/towerd/v1/bases/{name}", pins.delete_base),
    Route("POST", "/towerd/v1/precache", precache.post_precache),
    Route("GET", "/towerd/v1/calibration", own_calibration.get_calibration),
    Route("POST", "/towerd/v1/calibration", own_calibration.post_calibration),
    Route("POST", "/towerd/v1/verify", upkeep.post_verify),
    Route("POST", "/towerd/v1/gc", upkeep.post_gc),
)

PAGE_ROUTES: tuple[Route, ...] = (
    Route("GET", "/", page.get_root),
    Route("GET", "/towerd", page.get_root),
    Route("GET", "/towerd/", page.get_page),
    Route("GET", "/towerd/page/{name}", page.get_asset),
)

ELSEWHERE_ROUTES: tuple[Route, ...] = tuple(
    Route(method, path, elsewhere.not_here) for method, path in elsewhere.ELSEWHERE
)

ROUTES = LLAMA_ROUTES + OWN_ROUTES + PAGE_ROUTES + ELSEWHERE_ROUTES


def add_routes(app: web.Application, routes: tuple[Route, ...] = ROUTES) -> None:
    """Register a table."""
    for route in routes:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler)  # HEAD as well
        else:
            app.router.add_route(route.method, route.path, route.handler)


def add_proxy_routes(app: web.Application) -> None:
    """Register the table in front of a llama-server: towerd's own endpoints, and everything else
    through to it."""
    from towerd.api import proxy_routes

    proxy_routes.connect(app)
    add_routes(app, OWN_ROUTES)
    add_routes(app, tuple(route for route in PAGE_ROUTES if route.path != "/"))
    add_routes(app, tuple(Route(*row) for row in proxy_routes.PROXY))
    app.router.add_route("*", "/{path:.*}", proxy_routes.unknown)
