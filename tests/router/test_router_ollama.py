"""Ollama's API in front of several models, by its own package."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon
from ollama import Client, ResponseError
from routed import MakeRouter, ask, states, suspended_reserve
from waiting import until

from towerd.models.bundled import bundled_model

HELLO = [{"role": "user", "content": "Tell me about a dog."}]
GREEDY = {"temperature": 0, "num_predict": 6}


def test_looking_loads_no_model(make_router: MakeRouter) -> None:
    """All are listed and shown by their files, what runs by its process; a broken file is a name alone."""
    router = make_router()
    with Client(host=router.url) as client:
        assert client.ps().models == []
        listed = {each.model: each for each in client.list().models}
        assert set(listed) == {"tales", "dice", "junk"}
        assert listed["tales"].size == bundled_model().stat().st_size
        details = listed["tales"].details
        assert details is not None
        assert (details.family, details.parameter_size) == ("llama", "260.0K")
        shown = client.show("tales:latest")
        assert shown.modelinfo is not None
        assert shown.modelinfo["general.architecture"] == "llama"
        trained = shown.modelinfo["llama.context_length"]
        assert set(states(router).values()) == {"unloaded"}
        assert client.chat("tales:latest", HELLO, options=GREEDY).model == "tales:latest"
        (running,) = client.ps().models
        assert (running.model, running.size_vram) == ("tales", 0)
        shown = client.show("tales")
        assert shown.modelinfo is not None
        assert running.context_length == shown.modelinfo["llama.context_length"] != trained


def test_a_model_comes_and_goes(make_router: MakeRouter) -> None:
    """Empty requests load and unload; one with text unloads behind its answer; to unload loads nothing."""
    router = make_router()
    with Client(host=router.url) as client:
        assert client.generate("dice", keep_alive=0).done_reason == "unload"
        assert states(router)["dice"] == "unloaded"
        assert client.generate("dice").done_reason == "load"
        assert states(router)["dice"] == "loaded"
        assert client.chat("dice", keep_alive="0s").done_reason == "unload"
        until(lambda: states(router)["dice"] == "unloaded")
        parts = list(client.chat("tales", HELLO, options=GREEDY, stream=True, keep_alive=0))
        assert parts[-1].done
        until(lambda: states(router)["tales"] == "unloaded")
        began_s = time.monotonic()
        said = client.chat("tales", HELLO, options=GREEDY, keep_alive="5m")
        took_s = time.monotonic() - began_s
        assert said.message.content
        assert 0.5 * took_s < (said.total_duration or 0) / 1e9 < took_s, "loading counts"
        assert states(router)["tales"] == "loaded"
        (running,) = client.ps().models
        assert running.expires_at is not None
        assert running.expires_at - datetime.now(UTC) <= timedelta(minutes=5)
        assert client.chat("tales", HELLO, options=GREEDY, keep_alive="300ms").done
        until(lambda: states(router)["tales"] == "unloaded")


def slots_of_tales(router: Daemon) -> list[dict[str, Any]]:
    return list(router.get("/slots?model=tales"))


def test_who_uses_a_model_keeps_it(make_router: MakeRouter) -> None:
    """A stream that runs in it continues, and it leaves when that has ended; a request that waits for it while it
    is loading is answered first; one that begins later keeps it."""
    router = make_router("-c", "65536")
    process = suspended_reserve(router)
    with Client(host=router.url) as client, ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(ask, router, "tales")
            until(lambda: states(router)["tales"] == "loading")
            assert client.generate("tales", keep_alive=0).done_reason == "unload"
        finally:
            process.resume()
        assert asked.result().status_code == 200
        until(lambda: states(router)["tales"] == "unloaded")
        long = {"ignore_eos": True, "n_predict": 60_000, "stream": True}
        body: dict[str, Any] = {"model": "tales", "prompt": "Once", **long}
        for is_later in (False, True):
            with requests.post(
                router.url + "/completion", json=body, stream=True, timeout=60
            ) as running:
                lines = running.iter_lines()
                next(lines)
                assert client.generate("tales", keep_alive=0).done_reason == "unload"
                assert [each.model for each in client.ps().models] == ["tales"], "it is not leaving"
                assert not any(b'"stop":true' in next(lines) for _ in range(200))
                if is_later:
                    assert ask(router, "tales").status_code == 200
            if not is_later:
                until(lambda: states(router)["tales"] == "unloaded")
        until(lambda: not any(each["is_processing"] for each in slots_of_tales(router)))
        assert [each.model for each in client.ps().models] == ["tales"]


def test_a_refused_request_unloads_nothing(make_router: MakeRouter) -> None:
    """Whether it would say something else or not."""
    router = make_router()
    url = router.url + "/api/chat"
    assert requests.post(url, json={"model": "tales", "messages": []}, timeout=60).ok
    for messages in ([], [{"role": "user", "content": 3}], HELLO):
        body: dict[str, Any] = {"model": "tales", "messages": messages, "keep_alive": 0}
        body["stream"] = "no"
        assert requests.post(url, json=body, timeout=60).status_code == 400
    body = {"model": "tales", "messages": [{"content": "x"}], "keep_alive": 0}
    assert requests.post(url, json=body, timeout=60).status_code == 400
    assert states(router)["tales"] == "loaded"
    with Client(host=router.url) as client:
        assert [each.model for each in client.ps().models] == ["tales"]


def test_only_what_generates_says_how_long_a_model_stays(make_router: MakeRouter) -> None:
    """What is refused, and what only reads tokens, says nothing of it. Who leaves has said it, as has one that ends
    beside an older one."""
    router = make_router("-c", "65536")
    two_hours = timedelta(hours=2)
    long = {"ignore_eos": True, "n_predict": 60_000, "stream": True}

    def post(path: str, **body: Any) -> requests.Response:
        body = {"model": "tales", **body}
        return requests.post(
            router.url + path, json=body, stream=bool(body.get("stream")), timeout=60
        )

    with Client(host=router.url) as client:

        def rest() -> timedelta:
            (running,) = client.ps().models
            assert running.expires_at is not None
            left: timedelta = running.expires_at - datetime.now(UTC)
            return left

        assert client.generate("tales", "Once", options=GREEDY, keep_alive="2h").done
        assert post("/api/generate", prompt="word " * 99_999, keep_alive=0).status_code == 400
        assert post("/v1/chat/completions", messages=5).status_code == 400
        assert post("/tokenize", content="Once").ok
        assert timedelta(hours=1) < rest() <= two_hours
        with post("/completion", prompt="Once", **long) as older:
            next(older.iter_lines())
            assert client.generate("tales", "Once", options=GREEDY, keep_alive="1h").done
        until(lambda: not any(each["is_processing"] for each in slots_of_tales(router)))
        assert rest() <= timedelta(hours=1)
        assert ask(router, "tales").status_code == 200
        assert rest() > two_hours
        options = {"num_predict": 60_000}
        with post(
            "/api/generate", prompt="Once", options=options, keep_alive=0, stream=True
        ) as one:
            next(one.iter_lines())
        until(lambda: states(router)["tales"] == "unloaded")
        assert post("/tokenize", content="Once").ok
        assert rest() > two_hours, "what was said is done"


def test_a_name_that_is_none(make_router: MakeRouter) -> None:
    """The error says which there are; a reply's name is the one that was given."""
    router = make_router()
    with Client(host=router.url) as client:
        for call in (client.show, client.chat, client.generate, client.pull):
            with pytest.raises(ResponseError, match="nope") as refused:
                call("nope:latest")
            assert refused.value.status_code == 404
        unnamed = requests.post(router.url + "/api/chat", json={"messages": HELLO}, timeout=60)
        assert (unnamed.status_code, unnamed.json()) == (400, {"error": "model is required"})
        with pytest.raises(ResponseError) as broken:
            client.chat("junk", HELLO)
        assert broken.value.status_code == 500
        assert "junk" in broken.value.error


def test_tenants_unload_nothing(make_router: MakeRouter) -> None:
    """What others use is not one tenant's to unload; its own request is answered."""
    router = make_router("--api-key", "ann:a", "--api-key", "bob:b")
    with Client(host=router.url, headers={"Authorization": "Bearer a"}) as client:
        assert client.chat("tales", HELLO, options=GREEDY, keep_alive=0).message.content
        with pytest.raises(ResponseError) as refused:
            client.generate("tales", keep_alive=0)
        assert refused.value.status_code == 403
        assert [each.model for each in client.ps().models] == ["tales"]


def test_no_comment_in_lines(make_router: MakeRouter, tmp_path: Path) -> None:
    """While a model takes so long to load that other streams get comments, lines of JSON wait."""
    (tmp_path / "m").mkdir()
    for name in ("tales", "other"):
        (tmp_path / "m" / f"{name}.gguf").write_bytes(bundled_model().read_bytes())
    router = make_router(folder=tmp_path / "m")
    process = suspended_reserve(router)
    with ThreadPoolExecutor(1) as pool:
        try:
            body: dict[str, Any] = {"model": "tales", "stream": True, "messages": HELLO}
            url = router.url + "/api/chat"
            asked = pool.submit(requests.post, url, json=body, timeout=120)
            other: dict[str, Any] = {
                "model": "tales",
                "prompt": "Once",
                "n_predict": 1,
                "stream": True,
            }
            url = router.url + "/completion"
            with requests.post(url, json=other, stream=True, timeout=120) as waiting:
                assert next(waiting.iter_lines()).startswith(b":")
        finally:
            process.resume()
        reply = asked.result()
    lines = reply.content.splitlines()
    assert [json.loads(line)["done"] for line in lines][-2:] == [False, True]
