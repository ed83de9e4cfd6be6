"""Which model a request is for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from towerd.api.http.body import decode_json
from towerd.api.http.form import boundary_of, read_form
from towerd.api.http.keys import LIMITS
from towerd.errors import InvalidRequest, NotFound
from towerd.router.loading.model import RoutedModel
from towerd.router.loading.models import Models

NAMES_SHOWN_MAX = 50


class AskedModel(msgspec.Struct, frozen=True):
    """What the router reads of a body; the model's process reads the rest."""

    model: Any = None
    stream: Any = None


async def asked_of(request: web.Request, body: bytes) -> AskedModel:
    """What a body says of its model. Raises InvalidRequest if it is not valid JSON, or a form with
    too many parts."""
    if not body:
        return AskedModel()
    read: Callable[[bytes], AskedModel] = _decode
    if request.content_type == "multipart/form-data":
        read = partial(_read_form, boundary_of(request.headers["Content-Type"]))
    if len(body) <= request.app[LIMITS].inline_bytes_max:
        return read(body)
    return await asyncio.to_thread(read, body)


def _read_form(boundary: bytes, body: bytes) -> AskedModel:
    return AskedModel(read_form(body, boundary).text("model"))


def _decode(body: bytes) -> AskedModel:
    try:
        asked: AskedModel = decode_json(body, AskedModel)
        return asked
    except msgspec.ValidationError:  # not an object
        return AskedModel()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from error


def choose(models: Models, name: object) -> RoutedModel:
    """The model of a name; without one the only model that is loaded, or that there is. Raises
    NotFound, which lists the models, and InvalidRequest as llama-server's router."""
    if isinstance(name, str) and name:
        if (model := models.find(name)) is not None:
            return model
        known = sorted(models.by_name)
        listed = ", ".join(known[:NAMES_SHOWN_MAX]) or "none"
        more = ", ..." if len(known) > NAMES_SHOWN_MAX else ""
        raise NotFound(f"model '{name[:200]}' not found; there are: {listed}{more}", models=known)
    for found in (models.loaded(), list(models.by_name.values())):
        if len(found) == 1:
            return found[0]
    raise InvalidRequest("model name is missing from the request")


def choose_for_store(models: Models, name: str | None, *, reads: bool) -> RoutedModel:
    """The model that answers for the store: the named one, else a loaded one, that used last, or one
    that is being loaded. If there is none, a change of the store loads the one used last. Raises
    InvalidRequest if it only `reads`: any model would do, and a person can choose a small one."""
    if name:
        return choose(models, name)
    if loaded := models.loaded():
        return loaded[0]
    known = list(models.by_name.values())
    for model in known:
        if model.is_on_its_way:
            return model
    if not known:
        raise NotFound("There is no model: put GGUFs into the models directory")
    usual = models.last_used() or known[0]
    if reads:
        raise InvalidRequest(
            "No model is loaded, and reading the store loads none: load one with POST /models/load, "
            f"such as {usual.name}, and ask again"
        )
    return usual
