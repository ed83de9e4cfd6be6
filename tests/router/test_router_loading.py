"""A router while it loads a model: what waits for it hears, and what a load that fails leaves alone."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from daemon import Daemon
from routed import LONG, MakeRouter, ask, children, metric, states, suspended_reserve
from waiting import until

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.models.bundled import bundled_model


def test_the_share_that_is_loaded(make_router: MakeRouter) -> None:
    """It rises from 0 to 1, with llama.cpp's shares between."""
    router = make_router()
    shares: list[float] = []
    with requests.get(router.url + "/models/sse", stream=True, timeout=60) as reply:
        assert ask(router, "dice").status_code == 200
        for line in reply.iter_lines():
            if line.startswith(b"data: "):
                data = json.loads(line[6:])["data"]
                if data.get("status") == "loaded":
                    break
                if "progress" in data:
                    shares.append(data["progress"]["value"])
    assert shares == sorted(set(shares))
    assert (shares[0], shares[-1]) == (0, 1)
    assert len(shares) > 5


def loading_shares(router: Daemon, shares: list[float]) -> None:
    """Add each share of a load that the router tells, until the model is loaded."""
    with requests.get(router.url + "/models/sse", stream=True, timeout=60) as reply:
        for line in reply.iter_lines():
            data = json.loads(line[6:])["data"] if line.startswith(b"data: ") else {}
            if data.get("status") == "loaded":
                return
            if "progress" in data:
                shares.append(data["progress"]["value"])


def test_who_waits_reads_how_far_the_load_is(make_router: MakeRouter, tmp_path: Path) -> None:
    """In comments, which are no events; the answer follows them in the same stream."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tales.gguf").write_bytes(bundled_model().read_bytes())
    make_random_gguf(tmp_path / "m" / "big.gguf", replace(PRESETS["tiny"], n_layer=24))
    router = make_router("--no-mmap", folder=tmp_path / "m")
    process = suspended_reserve(router)
    shares: list[float] = []
    body: Any = {"model": "big", "prompt": "Once", "n_predict": 2, "stream": True}
    with ThreadPoolExecutor(2) as pool:
        listening = pool.submit(loading_shares, router, shares)
        asked = pool.submit(
            requests.post, router.url + "/completion", json=body, stream=True, timeout=120
        )
        try:
            until(lambda: states(router)["big"] == "loading")
            while not shares or shares[-1] == 0:  # the process runs in steps shorter than its load
                process.resume()
                time.sleep(0.004)
                process.suspend()
                time.sleep(0.03)  # the share arrives before the process continues
            with asked.result() as reply:
                lines = reply.iter_lines()
                if shares[-1] < 1:  # else it was loaded before it could be suspended
                    next(
                        x
                        for x in lines
                        if x == f": the model is loading, {shares[-1]:.0%}".encode()
                    )
                process.resume()
                said = [line for line in lines if line and not line.startswith(b":")]
        finally:
            process.resume()
        listening.result()
    assert all(line.startswith(b"data: {") for line in said)
    assert json.loads(said[-1][6:])["stop"]


@pytest.mark.parametrize("damage", ["page", "cut", "unknown"])
def test_a_broken_file_unloads_no_model(
    make_router: MakeRouter, tmp_path: Path, damage: str
) -> None:
    """Where one would have to leave for it, it is refused first, and says the same as where none
    has to; `/models` says that it failed."""
    folder, whole = tmp_path / "m", bundled_model().read_bytes()
    folder.mkdir()
    (folder / "tales.gguf").write_bytes(whole)
    broken = {"page": b"<html>", "cut": whole[:-9], "unknown": whole.replace(b"llama", b"lloma")}
    (folder / "broken.gguf").write_bytes(broken[damage])
    router = make_router("--models-max", "1", folder=folder)
    alone = ask(router, "broken")
    assert alone.status_code == 500
    assert ask(router, "tales").status_code == 200
    before = children(router)
    router.get("/models?reload=1")  # a failure is not remembered after that
    beside = ask(router, "broken")
    assert (beside.status_code, beside.json()) == (500, alone.json())
    assert children(router) == before
    status = router.get("/models")["data"][0]["status"]
    assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 1)
    assert ask(router, "broken").json() == alone.json()
    assert metric(router, "towerd_model_unloads_total") == 0
    until(lambda: len(psutil.Process(router.pid).children()) == 2)  # one is in reserve again


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('llama_server_args = ["--mmproj", "/missing"]', "The file of --mmproj is missing."),
        ('llama_server_args = ["--logit-bias", "x"]', "refuses a flag: --logit-bias"),
        ('predictor = "/missing"', "is not a predictor"),
    ],
)
def test_settings_that_cannot_be_unload_no_model(
    make_router: MakeRouter, setting: str, reason: str
) -> None:
    router = make_router(
        "--models-max", "1", toml=f'[models.wrong]\nmodel = "{bundled_model()}"\n{setting}\n'
    )
    assert ask(router, "tales").status_code == 200
    before = children(router)
    reply = ask(router, "wrong")
    assert reason in reply.json()["error"]["message"]
    assert children(router) == before


def test_a_model_that_nobody_waits_for_any_more(make_router: MakeRouter) -> None:
    """Its client left while it was loading: it is loaded, and unloaded for want of use."""
    router = make_router(toml="[models.tales]\nidle_s = 0.1\n")
    process = suspended_reserve(router)
    with closing(requests.Session()) as client, ThreadPoolExecutor(1) as pool:
        url, body = router.url + "/completion", {"model": "tales", "prompt": "Once"}
        asked = pool.submit(client.post, url, json=body, timeout=(5, 0.5))
        until(lambda: states(router)["tales"] == "loading")
        assert isinstance(asked.exception(), requests.ReadTimeout)
        until(lambda: metric(router, "towerd_model_requests_waiting") == 0)
    process.resume()
    until(lambda: metric(router, "towerd_model_unloads_total") == 1)
    assert metric(router, "towerd_model_loads_total") == 1


def test_a_model_that_is_unloaded_while_it_is_loading(make_router: MakeRouter) -> None:
    """Who waits for it reads that, not how its process ended; so when the router leaves."""
    router = make_router()
    suspended_reserve(router)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, router, "tales")
        until(lambda: states(router)["tales"] == "loading")
        router.post("/models/unload", {"model": "tales"})
        assert "tales was unloaded while it was loading" in asked.result().text
        assert ask(router, "tales").status_code == 200  # that is no failure to remember
        suspended_reserve(router)
        asked = pool.submit(ask, router, "dice")
        until(lambda: states(router)["dice"] == "loading")
        router.signal(signal.SIGTERM)
        reply = asked.result()
    assert reply.status_code == 503
    assert "shutting down" in reply.json()["error"]["message"]
    assert router.wait() == 0, router.log


def test_requests_that_failed_are_not_kept(make_router: MakeRouter) -> None:
    """Those of conversations are remembered for their streams, of which these have none."""
    router = make_router()
    memory = psutil.Process(router.pid).memory_info
    body: Any = {"model": "junk", "prompt": "x" * 8 * 2**20, "stream": True}
    taken = []
    for n in range(24):
        headers = {"X-Conversation-Id": str(n)}
        reply = requests.post(router.url + "/completion", json=body, headers=headers, timeout=60)
        assert reply.status_code == 500
        taken.append(memory().rss)
    assert taken[-1] - taken[3] < 80 * 2**20


def test_a_file_that_is_no_model(make_router: MakeRouter) -> None:
    """All who wait get the reason in a sentence, which names no file; others are served."""
    router = make_router()
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: ask(router, "junk"), range(3)))
    for reply in replies:
        assert reply.status_code == 500
        message = reply.json()["error"]["message"]
        assert message == "junk is not a GGUF file; convert the model to GGUF first."
    status = router.get("/models")["data"][1]["status"]
    assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 1)
    assert ask(router, "tales").status_code == 200


def test_a_reload_while_a_model_is_loading(make_router: MakeRouter, tmp_path: Path) -> None:
    """Its files are others now: no process of the old ones stays, and its requests are answered."""
    folder = tmp_path / "own"
    (folder / "x").mkdir(parents=True)
    (folder / "x.gguf").write_bytes(bundled_model().read_bytes())
    router = make_router(folder=folder)
    router.post("/models/load", {"model": "x"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, router, "x")
        (folder / "x.gguf").rename(folder / "x" / "moved.gguf")
        router.get("/models?reload=1")
        assert waiting.result().status_code == 200
    assert str(folder / "x" / "moved.gguf") in router.get("/models")["data"][0]["status"]["args"]
    assert ask(router, "x").status_code == 200
    assert len(children(router)) == 1
    (folder / "x" / "moved.gguf").unlink()
    router.get("/models?reload=1")
    assert children(router) == set()
    assert ask(router, "x").status_code == 404
    assert router.stop() == 0, router.log


def test_each_model_records_its_own_traffic(make_router: MakeRouter, tmp_path: Path) -> None:
    """In a file of its own, whose name is the model's: whole lines, and those of its requests."""
    toml = f"[models.'my/tales']\nmodel = '{bundled_model()}'\n"
    router = make_router("--record", str(tmp_path / "trace.jsonl"), toml=toml)
    n_tokens = {
        name: [ask(router, model, prompt).json()["tokens_evaluated"] for prompt in ("Once", LONG)]
        for name, model in (("my%2Ftales", "my/tales"), ("dice", "dice"))
    }
    assert router.stop() == 0, router.log
    assert {each.name for each in tmp_path.glob("trace.*")} == {
        f"trace.{n}.jsonl" for n in n_tokens
    }
    for name, evaluated in n_tokens.items():
        text = (tmp_path / f"trace.{name}.jsonl").read_text()
        head, *lines = [json.loads(line) for line in text.splitlines()]
        assert head["format"] == "towerd-trace/1"
        assert [line["in"] for line in lines] == evaluated


def test_a_copy_of_a_loaded_file_is_refused(
    make_router: MakeRouter, models_dir: Path, tmp_path: Path
) -> None:
    """With a reason that its client can act on, and the first one still answers."""
    (folder := tmp_path / "copies").mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.gguf").write_bytes((models_dir / "tales.gguf").read_bytes())
    router = make_router(folder=folder)
    assert ask(router, "one").status_code == 200
    refused = ask(router, "two")
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (409, "conflict_error")
    assert "served already under another name" in error["message"]
    assert ask(router, "one").status_code == 200
