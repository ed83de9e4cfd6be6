"""Constrained output: grammar, json_schema and response_format settle on one GBNF text."""

from __future__ import annotations

from typing import Any

from towerd.api import fields
from towerd.api.fields import Body
from towerd.api.off_loop import apart
from towerd.errors import InvalidRequest


async def native_grammar(body: Body) -> str:
    """The grammar of /completion and /v1/completions: `grammar` wins over `json_schema`.

    Raises InvalidRequest."""
    if body.get("grammar") is None and body.get("json_schema") is not None:
        return await _from_schema(body["json_schema"])
    return fields.string(body, "grammar", "")


async def chat_grammar(body: Body) -> str:
    """The grammar of a chat request: `grammar`, `json_schema` or `response_format`.

    Raises InvalidRequest."""
    grammar = fields.string(body, "grammar", "")
    schema = body.get("json_schema")
    if schema is not None and grammar:
        raise InvalidRequest("Cannot use both json_schema and grammar")
    response_format = fields.mapping(body, "response_format")
    kind = fields.string(response_format, "type", "")
    if kind == "json_object":
        if "schema" in response_format or not schema:
            schema = fields.mapping(response_format, "schema")
    elif kind == "json_schema":
        schema = fields.mapping(fields.mapping(response_format, "json_schema"), "schema")
    elif kind not in ("", "text"):
        raise InvalidRequest(
            f'response_format type must be one of "text" or "json_object", but got: {kind}'
        )
    return grammar if schema is None else await _from_schema(schema)


async def _from_schema(schema: Any) -> str:
    if schema == {}:
        schema = {"type": "object"}  # an empty schema means any object
    if not isinstance(schema, dict):
        raise fields.wrong_type("json_schema", "object", schema)
    try:
        return await apart(_convert, schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"Field 'json_schema': {error.message}") from error


def _convert(schema: dict[str, Any]) -> str:
    # Imported late: it loads llama.cpp's converter, which a server without schemas never needs.
    from towerd.engine.embedded.grammar import schema_to_gbnf

    return schema_to_gbnf(schema)
