"""A daemon keeps to its --ram-max whatever clients do: RSS is looked at from outside all the time."""

from __future__ import annotations

import json
import random
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, run_towerd
from resident import watched
from routed import states
from seeing import make_seeing
from waiting import until

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Shape
from lab.models.vision import picture
from towerd.models.bundled import bundled_model

MIB = 1 << 20
SHAPE = Shape(8, 64, 2, 2, 128, 2000, 512, n_ctx_train=4096, rope_freq_base=10000.0)
"""32 KiB of rows a token, and hardly any weights."""
RAM_MAX = 320 * MIB
OVER_MAX = 1.05
N_CTX = 2048
SAME = ("--ctx-size", str(N_CTX), "--fidelity", "exact", "--flash-attn", "on")
CHATS = 10
Reply = requests.Response


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fat") / "fat.gguf"
    make_random_gguf(path, SHAPE)
    return path


@pytest.fixture
def small(tmp_path: Path, model: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, "-m", str(model), "--ram-max", str(RAM_MAX), *SAME) as daemon:
        yield daemon


def prompt(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(n)]


def complete(daemon: Daemon, ids: Any, **fields: Any) -> Reply:
    body = {"prompt": ids, "n_predict": 4, "temperature": 0, "ignore_eos": True, **fields}
    return requests.post(daemon.url + "/completion", json=body, timeout=240)


def at_once(asks: Sequence[Callable[[], Reply]]) -> list[Reply]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return [each.result() for each in [pool.submit(ask) for ask in asks]]


def statuses(replies: list[Reply]) -> Counter[int]:
    for each in replies:
        if each.status_code == 503:
            assert "--ram-max" in each.json()["error"]["message"] or "bodies" in each.text
    return Counter(each.status_code for each in replies)


def test_chats_and_their_next_turns(small: Daemon) -> None:
    """Ten chats at once take more than the context and the limit: they wait, leave it, and come back."""
    chats = [prompt(700, seed) for seed in range(CHATS)]
    with watched(small.pid) as seen:
        first = at_once([partial(complete, small, ids) for ids in chats])
        turns = [[*ids, *prompt(60, 99)] for ids in chats]
        second = at_once([partial(complete, small, ids) for ids in turns])
    assert statuses([*first, *second]) == {200: 2 * CHATS}
    assert seen.peak <= OVER_MAX * RAM_MAX
    reused = [each.json()["timings"]["cache_n"] for each in second]
    assert min(reused) >= 699, "what left was restored, not evaluated again"
    stats = small.get("/towerd/v1/stats")["ram"]
    assert stats["ram_bytes_max"] == RAM_MAX
    assert abs(stats["ram_bytes"] - seen.peak) < RAM_MAX / 2


def test_answers_are_those_of_a_daemon_with_more_ram(tmp_path: Path, model: Path) -> None:
    """One at a time, so that both evaluate the same batches."""
    said = []
    for name, flags in (("little", ("--ram-max", str(RAM_MAX))), ("much", ("--ram-max", "0"))):
        alone = (*SAME, "--parallel", "1", "--ubatch-size", "256")
        with Daemon(tmp_path / name, "-m", str(model), *flags, *alone) as daemon:
            chats = [prompt(900, seed) for seed in range(4)]
            replies = [complete(daemon, ids) for ids in chats]
            replies += [complete(daemon, [*ids, *prompt(60, 99)]) for ids in chats]
            said.append([each.json()["content"] for each in replies])
    assert said[0] == said[1]


def test_large_replies_leave_nothing_behind(small: Daemon) -> None:
    """Probabilities of eighty thousand tokens: they take no RAM once they were sent."""
    asked = [prompt(10, seed) for seed in range(4)]
    for _ in range(3):
        with watched(small.pid) as seen:
            reply = complete(small, asked, n_predict=20, n_probs=1000)
        assert reply.status_code == 200
        said = [each["completion_probabilities"] for each in reply.json()]
        assert [len(each) for each in said] == [20] * 4
        assert seen.peak <= OVER_MAX * RAM_MAX
        assert complete(small, prompt(10, 1)).status_code == 200


def test_replies_with_many_probabilities(small: Daemon) -> None:
    """They wait for each other, or are refused for what they would take; a stream takes nothing that stays."""
    wide = {"n_predict": 700, "n_probs": 1000}
    biased = {"logit_bias": [[i, -1.0] for i in range(300, 1900)], "n_predict": 8}
    with watched(small.pid) as seen:
        refused = at_once([partial(complete, small, prompt(20, s), **wide) for s in range(4)])
        some = at_once(
            [partial(complete, small, prompt(20, s), n_predict=40, n_probs=500) for s in range(6)]
        )
        many = [prompt(10, s) for s in range(30)]
        some += at_once([partial(complete, small, many, **biased) for _ in range(3)])
        streamed = complete(small, prompt(20, 1), n_predict=200, n_probs=1000, stream=True)
    assert seen.peak <= OVER_MAX * RAM_MAX
    assert statuses(refused) == {413: 4}
    assert "Replying to this request may take" in refused[0].text
    assert statuses(some)[200] >= 3
    assert set(statuses(some)) <= {200, 503}
    assert streamed.text.count("completion_probabilities") == 200


def test_many_replies_with_some_probabilities(small: Daemon) -> None:
    """Eight at once, as a program that looks at alternatives asks for them: none is refused."""
    chats = [partial(complete, small, prompt(20, s), n_predict=250, n_probs=60) for s in range(8)]
    with watched(small.pid) as seen:
        first, replies = at_once(chats), at_once(chats)
    assert statuses([*first, *replies]) == {200: 16}
    assert [len(each.json()["completion_probabilities"]) for each in replies] == [250] * 8
    assert seen.peak <= OVER_MAX * RAM_MAX


def test_bodies_that_are_too_large(small: Daemon) -> None:
    """Texts, lists of numbers and junk: each is refused for what it is, and chats are answered meanwhile."""
    wide = {"prompt": "x " * (8 * MIB)}
    numbers = {"prompt": [7] * 3_000_000}
    junk = "[" * 100 + "1," * (20 * MIB)

    def post(path: str, **how: Any) -> Reply:
        return requests.post(small.url + path, timeout=240, **how)

    asks: list[Callable[[], Reply]] = []
    for _ in range(3):
        asks += [
            lambda: post("/completion", json=wide),
            lambda: post("/completion", json=numbers),
            lambda: post("/tokenize", json={"content": wide["prompt"]}),
            lambda: post("/completion", data=junk),
        ]
    asks += [partial(complete, small, prompt(200, seed)) for seed in range(4)]
    with watched(small.pid) as seen:
        replies = at_once(asks)
    assert seen.peak <= OVER_MAX * RAM_MAX
    assert set(statuses(replies[:12])) <= {400, 413, 503}
    assert statuses(replies[12:]) == {200: 4}
    until(lambda: complete(small, prompt(20, 1)).status_code == 200)


def test_slow_clients_and_those_that_leave(small: Daemon) -> None:
    """Streams that are not read, and bodies that are sent in part, hold no RAM that others need."""
    host, _, port = small.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": prompt(300, 5), "n_predict": 200, "stream": True}).encode()
    head = b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    open_ones = []
    with watched(small.pid) as seen:
        for i in range(12):
            client = socket.create_connection((host, int(port)))
            whole = head % len(body) + body
            client.sendall(whole if i % 2 else head % (30 * MIB) + b"x" * MIB)
            open_ones.append(client)
        replies = at_once([partial(complete, small, prompt(300, s)) for s in range(6)])
        for client in open_ones:
            client.close()
    assert statuses(replies) == {200: 6}
    assert seen.peak <= OVER_MAX * RAM_MAX


def test_refused_in_the_shape_of_the_api_until_there_is_room(tmp_path: Path) -> None:
    """A limit that the process alone exceeds, as when other programs' growth is counted in it."""
    with Daemon(tmp_path, "-m", str(bundled_model()), "--ram-max", "0") as daemon:
        taken = daemon.get("/towerd/v1/stats")["ram"]["ram_bytes"]
    with Daemon(
        tmp_path / "b", "-m", str(bundled_model()), "--ram-max", str(taken + 150 * MIB)
    ) as it:
        assert complete(it, "Once").status_code == 200
        began = time.monotonic()
        huge = requests.post(
            it.url + "/v1/messages", data=b'{"a": "' + b"x" * (40 * MIB), timeout=60
        )
        assert huge.status_code in (413, 503)
        assert huge.json()["type"] == "error"
        assert time.monotonic() - began < 60
        assert complete(it, "Once").status_code == 200


def test_pictures(tmp_path: Path) -> None:
    """Some at once, which are decoded one after the other; what has too many pixels is refused for that."""
    model, projector = make_seeing(tmp_path, "qwen2vl")
    limit = 320 * MIB
    flags = ("-m", str(model), "--ram-max", str(limit), "--", "--mmproj", str(projector))

    def look(daemon: Daemon, seed: int, side: int) -> Reply:
        url = "data:image/png;base64," + picture(seed, side, side)
        parts: list[Any] = [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        body: Any = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        return requests.post(daemon.url + "/v1/chat/completions", json=body, timeout=240)

    with Daemon(tmp_path / "d", *flags) as daemon, watched(daemon.pid) as seen:
        some = at_once([partial(look, daemon, seed, 640) for seed in range(6)])
        large = at_once([partial(look, daemon, seed, 4800) for seed in range(3)])
        assert look(daemon, 9, 96).status_code == 200
    assert statuses(some) == {200: 6}
    assert {each.json()["error"]["code"] for each in large} == {400}
    assert "when they are decoded" in large[0].text
    assert seen.peak <= OVER_MAX * limit


def test_two_models_where_one_fits(tmp_path: Path) -> None:
    """The limit is for the router and all of its models: the idle one leaves before the other is loaded."""
    limit = 460 * MIB
    (tmp_path / "m").mkdir()
    for seed, name in enumerate(("one", "two")):
        make_random_gguf(tmp_path / "m" / f"{name}.gguf", SHAPE, seed=seed)
    flags = ("--models-dir", str(tmp_path / "m"), "--ram-max", str(limit), "--fidelity", "exact")
    with Daemon(tmp_path / "d", *flags) as router, watched(router.pid) as seen:
        for name in ("one", "two"):
            assert complete(router, prompt(200, 1), model=name).status_code == 200
            assert [each for each, state in states(router).items() if state == "loaded"] == [name]
        asks = [(prompt(500, seed), ("one", "two")[seed % 2]) for seed in range(8)]
        replies = at_once([partial(complete, router, ids, model=name) for ids, name in asks])
        assert statuses(replies) == {200: 8}
        junk = requests.post(router.url + "/completion", data=b"x" * (40 * MIB), timeout=60)
        assert junk.status_code == 413
        assert complete(router, prompt(20, 1), model="two").status_code == 200
    assert limit / 2 < seen.peak <= OVER_MAX * limit


def test_a_model_that_does_not_fit_alone(tmp_path: Path, model: Path) -> None:
    """The router serves on, and says what would help."""
    with Daemon(tmp_path, "--models-dir", str(model.parent), "--ram-max", "230M") as router:
        for _ in range(2):
            reply = complete(router, [1, 2], model="fat")
            assert reply.status_code == 500
            assert "Raise it by" in reply.json()["error"]["message"]
        assert requests.get(router.url + "/health", timeout=30).status_code == 200


def test_a_router_in_a_limited_address_space(tmp_path: Path, model: Path) -> None:
    """A limit that is far away refuses nothing."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "fat.gguf").symlink_to(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (100 << 30, hard))
    try:
        router = Daemon(tmp_path / "d", "--models-dir", str(tmp_path / "m"), "--ram-max", "0")
        router.spawn()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    router.wait_ready()
    with router:
        for n_mib in (7, 9, 20):
            reply = complete(router, "a", model="fat", junk="y" * (n_mib * MIB))
            assert reply.status_code == 200, reply.text


LIMITED = 900 * MIB


@pytest.fixture
def little_space(tmp_path: Path, model: Path) -> Iterator[Daemon]:
    """A daemon under `ulimit -v`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (LIMITED, hard))
    try:
        daemon = Daemon(tmp_path, "-m", str(model), "--fidelity", "exact", "--threads", "2")
        daemon.spawn()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    daemon.wait_ready()
    with daemon:
        yield daemon


def test_address_space(little_space: Daemon) -> None:
    """Requests wait or are refused, and the daemon continues."""
    daemon = little_space
    n_ctx = daemon.get("/props")["default_generation_settings"]["n_ctx"]
    asks = [partial(complete, daemon, prompt(n_ctx // 3, seed)) for seed in range(8)]
    asks += [partial(complete, daemon, "x " * (n * MIB)) for n in (1, 8, 30)]
    replies = at_once(asks)
    assert statuses(replies[:8]) == {200: 8}
    assert set(statuses(replies[8:])) <= {400, 413, 503}
    assert complete(daemon, prompt(100, 1)).status_code == 200
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("n_mib", [250, 520, 600])
def test_address_space_that_does_not_do(tmp_path: Path, model: Path, n_mib: int) -> None:
    """One sentence, and no abort."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (n_mib * MIB, hard))
    try:
        done = run_towerd(
            tmp_path, "serve", "--socket", str(tmp_path / "s"), "--port", "0", "-m", str(model)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert done.returncode == 1
    assert "ulimit -v" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ram-max", "120M"), "Raise it by"),
        (("--ram-max", "360M", "--ctx-size", "4000000"), "lower it to"),
        (("--ram-max", "x"), "must be a size"),
    ],
)
def test_a_start_that_cannot_fit(
    tmp_path: Path, model: Path, flags: tuple[str, ...], said: str
) -> None:
    """One sentence, before anything is served."""
    done = run_towerd(
        tmp_path, "serve", "--socket", str(tmp_path / "s"), "--port", "0", "-m", str(model), *flags
    )
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("limit", "flags"), [(100, ()), (215, ()), (240, ("--ctx-size", "3000"))])
def test_what_is_said_to_suffice_does(
    tmp_path: Path, model: Path, limit: int, flags: tuple[str, ...]
) -> None:
    """Where the weights do not fit, no context does, or the one that was asked for does not."""
    start = "serve", "--socket", str(tmp_path / "s"), "--port", "0", "-m", str(model), "--ram-max"
    refused = run_towerd(tmp_path, *start, f"{limit}M", *flags)
    said = refused.stdout + refused.stderr
    found = re.search(r"Raise it by ([\d,]+) MiB", said)
    assert found is not None, said
    limit += int(found[1].replace(",", ""))
    with Daemon(tmp_path, "-m", str(model), "--ram-max", f"{limit}M", *flags) as daemon:
        assert complete(daemon, prompt(100, 1)).status_code == 200


def test_what_is_not_set_is_made_to_fit(tmp_path: Path, model: Path) -> None:
    flags = ("-m", str(model), "--ram-max", "260M", "--hot-bytes", "1G")
    with Daemon(tmp_path, *flags) as daemon:
        assert "MiB instead of 1,024 MiB: --ram-max 260 MiB" in daemon.log
        n_ctx = daemon.get("/props")["default_generation_settings"]["n_ctx"]
        assert 512 <= n_ctx < SHAPE.n_ctx_train
        assert f"the context has {n_ctx:,} tokens instead of 4,096" in daemon.log
        with watched(daemon.pid) as seen:
            assert complete(daemon, prompt(n_ctx - 10, 1)).status_code == 200
        assert seen.peak <= 260 * MIB * OVER_MAX


def test_a_model_that_was_asleep_has_the_context_that_clients_know(
    tmp_path: Path, model: Path
) -> None:
    """Though what it is made from is measured anew."""
    flags = ("-m", str(model), "--ram-max", "260M", "--sleep-idle-seconds", "1")
    with Daemon(tmp_path, *flags) as daemon:
        n_ctx = daemon.get("/props")["default_generation_settings"]["n_ctx"]
        ids = prompt(n_ctx - 100, 1)
        assert complete(daemon, ids).status_code == 200
        for _ in range(2):
            until(lambda: daemon.get("/props")["is_sleeping"])
            again = complete(daemon, ids)
            assert again.status_code == 200, again.text
            assert again.json()["timings"]["cache_n"] > 0
            assert daemon.get("/props")["default_generation_settings"]["n_ctx"] == n_ctx
