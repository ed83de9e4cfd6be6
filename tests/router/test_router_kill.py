"""Killed in the middle of going from one model to another: what was answered is stored."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest
import requests
from daemon import Daemon
from routed import MakeRouter
from waiting import until

N_KILLS = 6


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
