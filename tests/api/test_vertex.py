"""Vertex AI's predictions: every instance is a request of its own, of the caller's tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.errors import ConfigError
from towerd.settings.sources import load
from towerd.settings.vertex import Vertex

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]
VERTEX = Vertex(0, "/v1/endpoints/7:predict", "/alive")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}


def instance(name: str, **body: Any) -> dict[str, Any]:
    return {"@requestFormat": name, **body}


async def predict(client: Client, instances: Any, **kwargs: Any) -> Any:
    async with client.post(VERTEX.predict, json={"instances": instances}, **kwargs) as reply:
        assert reply.status == 200
        return (await reply.json())["predictions"]


async def test_each_by_itself(make_client: MakeClient) -> None:
    """Instances that fail say so in their place; the others are answered as by their own endpoint."""
    client = await make_client(vertex=VERTEX)
    found = await predict(
        client,
        [
            instance("chatCompletions", **CHAT, stream=True),
            instance("chatCompletions", messages="none"),
            instance("/v1/completions", prompt="Once", max_tokens=2, temperature=0),
            instance("tokenize", content="Hello"),
            instance("nothing"),
            instance("predict"),
            instance("v1/endpoints/7:predict"),
            instance("/towerd/v1/gc"),
            {"prompt": "Once"},
            7,
        ],
    )
    async with client.post("/v1/chat/completions", json=CHAT) as reply:
        alone = await reply.json()
    assert found[0]["choices"] == alone["choices"]
    assert found[1]["error"]["code"] == 400
    assert found[2]["object"] == "text_completion"
    assert found[3]["tokens"]
    for wrong, words in zip(
        found[4:],
        ["no handler", "no handler", "no handler", "no handler", "@requestFormat", "JSON object"],
        strict=True,
    ):
        assert words in wrong["error"]["message"]
    async with client.get("/alive") as reply:
        assert (await reply.json()) == {"status": "ok"}


@pytest.mark.parametrize(
    "body",
    [{}, {"instances": {}}, [], {"instances": [1] * 129}],
    ids=["none", "object", "list", "many"],
)
async def test_bad_bodies(make_client: MakeClient, body: Any) -> None:
    client = await make_client(vertex=VERTEX)
    async with client.post(VERTEX.predict, json=body) as reply:
        assert reply.status == 400


async def test_keys_and_tenants(make_client: MakeClient) -> None:
    """Nobody predicts without a key, and what is predicted belongs to the key's tenant."""
    client = await make_client(vertex=VERTEX, api_keys=(("ka", "ann"), ("kb", "bob")))
    async with client.post(VERTEX.predict, json={"instances": []}) as reply:
        assert reply.status == 401
    async with client.get(VERTEX.health) as reply:  # which needs none
        assert reply.status == 200
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("ka", "kb"))
    (found,) = await predict(client, [instance("chatCompletions", **CHAT)], headers=ann)
    assert found["choices"]
    for headers, n in ((ann, 1), (bob, 0)):
        async with client.get("/towerd/v1/sessions", headers=headers) as reply:
            assert len((await reply.json())["sessions"]) == n


async def test_no_route_without_vertex(client: Client) -> None:
    async with client.post("/predict", json={"instances": []}) as reply:
        assert reply.status == 404


def test_variables(tmp_path: Path) -> None:
    """They say where to listen; what is wrong in them is said."""
    toml = tmp_path / "towerd.toml"
    toml.touch()
    flags = {"store_dir": str(tmp_path), "host": "0.0.0.0"}
    env = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "8085", "AIP_PREDICT_ROUTE": "p"}
    config = load(flags, env, toml)
    assert (config.port, config.vertex) == (8085, Vertex(8085, "/p", ""))
    for wrong in ("x", "-1", "99999"):
        with pytest.raises(ConfigError, match="AIP_HTTP_PORT is a port"):
            load(flags, env | {"AIP_HTTP_PORT": wrong}, toml)
    for wrong in ("/p{", "/{x}", "a b", "/"):
        with pytest.raises(ConfigError, match="AIP_PREDICT_ROUTE is a path"):
            load(flags, env | {"AIP_PREDICT_ROUTE": wrong}, toml)
    with pytest.raises(ConfigError, match="set a key"):
        load(flags, {"AIP_MODE": "BATCH"}, toml)
