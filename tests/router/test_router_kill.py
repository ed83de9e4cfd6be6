"""Killed in the middle of going from one model to another: what was answered is stored."""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest
import requests
from daemon import Daemon
from mixed_clients import MixedClient
from routed import MakeRouter, ask
from waiting import until

N_KILLS = 6
SOAK_KILLS = 24
VOCABULARIES = {"tales": range(260, 500), "dice": range(360, 448)}
"""Ids of ordinary tokens."""


class Chat:
    """A conversation with one model, continued with all of its tokens for as long as it may."""

    def __init__(self, model: str, start: int) -> None:
        self.model = model
        self.ids = [start + n for n in range(40)]
        self.session = ""
        self.n_answers = 0

    def continue_until(self, router: Daemon, is_over: threading.Event) -> None:
        """Have turns until a kill ends one. What a reply says is stored with its end."""
        fixed = {"n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        while not is_over.is_set():
            body: dict[str, Any] = {"model": self.model, "prompt": [*self.ids, 300], **fixed}
            try:
                reply = requests.post(router.url + "/completion", json=body, timeout=60)
                answer = reply.json()
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                return
            if reply.status_code != 200:  # the model's process was killed
                time.sleep(0.05)
                continue
            assert reply.headers["X-Towerd-Session"] == (
                self.session or reply.headers["X-Towerd-Session"]
            )
            self.session = reply.headers["X-Towerd-Session"]
            self.ids = [*body["prompt"], *answer["tokens"]]
            self.n_answers += 1

    def wait_for_answer(self) -> None:
        """Wait until it has one more."""
        n_before = self.n_answers
        until(lambda: self.n_answers > n_before)


def kill_one(router: Daemon, chance: random.Random) -> None:
    """The router, or first one of its processes."""
    if chance.random() < 0.5:
        for each in psutil.Process(router.pid).children()[:1]:
            with suppress(psutil.NoSuchProcess):  # models come and go
                each.kill()
        time.sleep(chance.uniform(0, 0.5))
    router.kill()


@pytest.mark.slow
def test_killed_between_two_models(make_router: MakeRouter) -> None:
    """There is room for one of two models and both are asked without end."""
    chance = random.Random(5)
    router = make_router("--models-max", "1", "--freeze-after", "0")
    chats = [Chat("tales", 260), Chat("dice", 100)]
    for n in range(N_KILLS):
        is_over = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            turns = [pool.submit(each.continue_until, router, is_over) for each in chats]
            try:
                chats[n % 2].wait_for_answer()
                time.sleep(chance.uniform(0.0, 2.0))  # then the other model is on its way
                kill_one(router, chance)
            finally:
                is_over.set()
            for each in turns:
                each.result()
        with router.stored():
            pass
        router.start()
        for chat in chats:
            if chat.session:
                path = f"/towerd/v1/sessions/{chat.session}?ids=1&model={chat.model}&autoload=1"
                kept = router.get(path)["ids"]
                assert kept[: len(chat.ids)] == chat.ids
    assert all(chat.n_answers for chat in chats)


def process_of(router: Daemon, role: str, chance: random.Random) -> int | None:
    """One of the processes of this role; the router says which is which."""
    processes = router.get("/towerd/v1/processes")["processes"]
    found = [each["pid"] for each in processes if each["role"] == role and each["pid"]]
    return chance.choice(found) if found else None


def test_the_router_is_the_broker(make_router: MakeRouter) -> None:
    """Its list of processes says so, with each model's and the one in reserve; so does its log."""
    router = make_router()
    assert ask(router, "tales").status_code == 200
    until(lambda: process_of(router, "reserve", random.Random()) is not None)
    listed = router.get("/towerd/v1/processes")["processes"]
    running = {each.pid for each in psutil.Process(router.pid).children()} | {router.pid}
    assert {each["pid"] for each in listed} == running
    (broker,) = (each for each in listed if each["is_broker"])
    assert (broker["pid"], broker["role"]) == (router.pid, "router")
    (model,) = (each for each in listed if each["role"] == "model")
    assert (model["model"], model["state"], model["silent"]) == ("tales", "loaded", None)
    assert f"the catalog's broker  pid={router.pid}" in router.log
    if sys.platform == "linux":
        names = {each["role"]: psutil.Process(each["pid"]).name() for each in listed}
        assert names["router"] == "towerd-router"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_kill_every_process(make_router: MakeRouter) -> None:
    """Clients do everything in two models while a model's process, the one in reserve or the router, which
    has the catalog, is killed: what was acknowledged is there, and requests are answered again."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    router = make_router("--freeze-after", "0", "-np", "4")
    clients = [
        MixedClient(router, seed + n, VOCABULARIES[model], model)
        for n, model in enumerate(("tales", "dice", "tales", "dice"))
    ]
    for n in range(SOAK_KILLS):
        is_over = threading.Event()
        with ThreadPoolExecutor(len(clients)) as pool:
            working = [pool.submit(each.run, is_over) for each in clients]
            time.sleep(chance.uniform(0.2, 4.0))
            role = ("model", "reserve", "router")[n % 3]
            pid = process_of(router, role, chance)
            if pid == router.pid:
                router.kill()
            elif pid is not None:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
                time.sleep(chance.uniform(0.2, 2.0))
            is_over.set()
            for each in working:
                each.result()
        if router.process is None:
            with router.stored():
                pass
            router.start()
        for client in clients:
            client.check()
    assert router.stop() == 0, router.log
