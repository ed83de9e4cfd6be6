"""GET endpoints that describe the server: health, props, models, slots, metrics, stats."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from towerd import __version__
from towerd.api.http.access import require_overview, seen_slots
from towerd.api.http.gate import ApiService, Asleep
from towerd.api.http.keys import (
    CONFIG,
    GATE,
    METRICS,
    TENANT,
    UI,
    UI_SETTINGS,
    service_of,
)
from towerd.api.http.reply import json_reply
from towerd.engine.base import Engine, ModelInfo, SlotView
from towerd.errors import SwitchedOff, Unavailable

BUILD_INFO = f"towerd-{__version__}"
"""The build that llama-server's endpoints name."""


async def get_health(request: web.Request) -> web.Response:
    """`{"status": "ok"}` once the model is loaded."""
    return json_reply({"status": "ok"})


async def get_models(request: web.Request) -> web.Response:
    """The model that is served."""
    if (asleep := request.app[GATE].asleep) is not None:
        return json_reply(asleep.models)
    return json_reply(models_json(service_of(request).engine))


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
        "data": [
            {
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
                    "towerd": {"gpu_bytes": info.gpu_bytes},
                },
            }
        ],
    }


async def get_props(request: web.Request) -> web.Response:
    """Defaults, context size, chat template and switches."""
    if not request.app[CONFIG].props_endpoint:
        raise SwitchedOff("This server does not support props endpoint. Start it with `--props`")
    if (asleep := request.app[GATE].asleep) is not None:
        return json_reply(asleep.props)
    return json_reply(_props(request.app, service_of(request).engine))


def _props(app: web.Application, engine: Engine) -> dict[str, Any]:
    config, info = app[CONFIG], engine.info
    props: dict[str, Any] = msgspec.json.decode(engine.wire.model.props())
    return props | {
        "total_slots": engine.n_slots,
        "model_alias": info.alias,
        "model_ftype": ftype(info),
        "model_path": info.path,
        "endpoint_slots": config.slots_endpoint,
        "endpoint_props": False,
        "endpoint_metrics": config.metrics_endpoint,
        "ui": bool(app[UI]),
        "ui_settings": app[UI_SETTINGS],
        "build_info": BUILD_INFO,
        "is_sleeping": False,
        "cors_proxy_enabled": config.ui_mcp_proxy,
    }


async def asleep(app: web.Application) -> Asleep:
    """What is answered while the embedded engine's model sleeps."""
    service = app[GATE].open()
    stats = await all_stats(service)
    props = _props(app, service.engine) | {"is_sleeping": True}
    own = await own_stats(app, service, stats)
    engine = service.engine
    own |= {"is_sleeping": True}
    return Asleep(props, models_json(engine), stats, own, engine.info, engine.n_ctx)


async def get_slots(request: web.Request) -> web.Response:
    """The live sequences, never their text. Of those of other tenants a caller with the overview
    sees that they are busy; to others they look idle."""
    if not request.app[CONFIG].slots_endpoint:
        raise SwitchedOff("This server does not support slots endpoint. Start it with `--slots`")
    slots = seen_slots(request, service_of(request).engine.slots())
    if request.query.get("fail_on_no_slot") and all(slot.is_processing for slot in slots):
        raise Unavailable("no slot available")
    shown = [_slot_json(slot) for slot in slots]
    if not request[TENANT].sees_all:
        for slot_json in shown:
            slot_json.pop("id_task", None)  # counts the requests of all tenants
    return json_reply(shown)


def _slot_json(slot: SlotView) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": slot.speculative,
        "is_processing": slot.is_processing,
    }
    if slot.request is None:
        return out
    return out | {
        "id_task": slot.id_task,
        "n_prompt_tokens": slot.n_tokens,
        "n_prompt_tokens_processed": slot.n_prompt_processed,
        "n_prompt_tokens_cache": slot.n_prompt_cached,
        "params": msgspec.json.decode(slot.request.settings(brief=True)),
        "next_token": [
            {
                "has_next_token": slot.has_next_token,
                "has_new_line": slot.has_new_line,
                "n_remain": slot.n_remain,
                "n_decoded": slot.n_decoded,
            }
        ],
    }


async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus text."""
    if not request.app[CONFIG].metrics_endpoint:
        raise SwitchedOff(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    require_overview(request)
    metrics, asleep = request.app[METRICS], request.app[GATE].asleep
    stats = await all_stats(service_of(request)) if asleep is None else asleep.stats
    body = await asyncio.to_thread(metrics.render, stats)
    reply = web.Response(body=body)
    reply.headers["Content-Type"] = "text/plain; version=0.0.4"
    reply.headers["Process-Start-Time-Unix"] = str(metrics.started_unix)
    return reply


async def get_stats(request: web.Request) -> web.Response:
    """Everything that the page and towerctl show: counters, gauges, slots."""
    require_overview(request)
    if (asleep := request.app[GATE].asleep) is not None:
        return json_reply(asleep.own_stats)
    service = service_of(request)
    return json_reply(await own_stats(request.app, service, await all_stats(service)))


async def own_stats(
    app: web.Application, service: ApiService, stats: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The answer of GET /towerd/v1/stats. stats: of `all_stats`."""
    metrics, engine = app[METRICS], service.engine
    return {
        "version": __version__,
        "engine_name": engine.name,
        "model": engine.info.alias,
        "model_path": engine.info.path,
        "n_ctx": engine.n_ctx,
        "n_slots": engine.n_slots,
        "is_sleeping": False,
        "fidelity": service.tiers.fidelity,
        "fingerprint": engine.info.row_identity.digest().hex(),
        "uptime_s": round(time.time() - metrics.started_unix, 3),
        "reuse": metrics.reuse_totals(),
        "slots": [
            {
                "id": slot.id,
                "is_processing": slot.is_processing,
                "n_tokens": slot.n_tokens,
                "n_decoded": slot.n_decoded,
            }
            for slot in engine.slots()
        ],
        **stats,
        "space": await asyncio.to_thread(service.cold.space),
    }


async def all_stats(service: ApiService) -> dict[str, dict[str, Any]]:
    """Counters and gauges of the engine, the tiers, the store, the cold tier and the traffic, what
    conversations take, what was written today, and what went to the shared tier and came from it."""
    footprint = await asyncio.to_thread(service.store.footprint)
    return {
        "engine": service.engine.stats(),
        "tiers": await asyncio.to_thread(service.tiers.stats),
        "store": await asyncio.to_thread(service.store.stats),
        "footprint": footprint.to_json(),
        "written": await asyncio.to_thread(service.store.writes.stats),
        "cold": await asyncio.to_thread(service.cold.stats),
        "traffic": service.traffic.stats() | service.sessions.stats(),
        "shared": {} if service.roaming is None else service.roaming.stats(),
        "ram": await asyncio.to_thread(service.tiers.ram.stats),
    }
