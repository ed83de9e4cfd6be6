"""Routes of responses and conversations that are kept. They need the catalog alone: a daemon serves them in
front of either engine, and a router without any model."""

from __future__ import annotations

from towerd.api.responses import conversations, responses
from towerd.app.store_routes import Route

_ROUTES = (
    ("GET", "/responses/{id}", responses.get_response),
    ("DELETE", "/responses/{id}", responses.delete_response),
    ("GET", "/responses/{id}/input_items", responses.list_input_items),
    ("POST", "/conversations", conversations.create_conversation),
    ("GET", "/conversations/{id}", conversations.get_conversation),
    ("POST", "/conversations/{id}", conversations.update_conversation),
    ("DELETE", "/conversations/{id}", conversations.delete_conversation),
    ("GET", "/conversations/{id}/items", conversations.list_items),
    ("POST", "/conversations/{id}/items", conversations.create_items),
    ("GET", "/conversations/{id}/items/{item}", conversations.get_item),
    ("DELETE", "/conversations/{id}/items/{item}", conversations.delete_item),
)
RESPONSE_ROUTES: tuple[Route, ...] = tuple(
    Route(method, base + path, handler) for method, path, handler in _ROUTES for base in ("", "/v1")
)
