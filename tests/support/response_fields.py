"""What towerd says of a response of /v1/responses beside what llama-server says of it."""

from __future__ import annotations

from typing import Any

OWN = {
    "conversation",
    "error",
    "incomplete_details",
    "instructions",
    "metadata",
    "previous_response_id",
    "store",
}


def as_llama_server(value: Any) -> Any:
    """A JSON value without that; a response that reached its limit, and its last item, are
    complete there."""
    if isinstance(value, list | tuple):
        return type(value)(as_llama_server(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get("object") == "response":
        assert set(value) >= OWN
        is_cut = value.get("status") == "incomplete"
        assert is_cut == (value["incomplete_details"] is not None)
        value = {key: item for key, item in value.items() if key not in OWN}
        value |= {"status": "completed"} if is_cut else {}
    elif value.get("status") == "incomplete":
        value = value | {"status": "completed"}  # the item that was said when the limit came
    return {key: as_llama_server(item) for key, item in value.items()}
