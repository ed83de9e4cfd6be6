"""LoRA adapters on the embedded engine: rows under other scales are other rows.

The oracle is llama-server with the same adapters, which evaluates every prompt anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, reuse_of, run_towerd
from lora_adapter import write_adapter

from towerd.cli.bench.harness.servers import llama_server
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model

MakeDaemon = Callable[..., Daemon]
Ids = list[int]
START = "Once upon a time there was a little girl who had a dog."
BARE: list[dict[str, float]] = [{"id": 0, "scale": 0}]
FIRST, SECOND = [{"id": 0, "scale": 1.0}], [{"id": 1, "scale": 0.3}]
SMALL = ("-c", "512", "-t", "1", "-ctk", "f32", "-ctv", "f32")


def ask(url: str, prompt: Any, **fields: Any) -> requests.Response:
    """A greedy completion."""
    body = {"temperature": 0, "n_predict": 16, "ignore_eos": True, "return_tokens": True}
    reply = requests.post(
        url + "/completion", json={**body, "prompt": prompt, **fields}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    return reply


def said(reply: requests.Response) -> Ids:
    """The ids of a completion."""
    ids: Ids = reply.json()["tokens"]
    return ids


def n_reused(reply: requests.Response) -> int:
    """Tokens of its prompt that were not evaluated."""
    reuse = reuse_of(reply.headers)
    return reuse["live"] + reuse["hot"] + reuse["warm"]


class Oracle:
    """llama-server with the same adapters and nothing cached."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, prompt: Any, lora: list[dict[str, float]]) -> Ids:
        return said(ask(self.url, prompt, lora=lora, cache_prompt=False))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags that load two adapters, the second at half its strength."""
    root = tmp_path_factory.mktemp("adapters")
    first, second = (
        write_adapter(root / f"{seed}.gguf", bundled_model(), seed=seed, strength=0.6)
        for seed in (1, 2)
    )
    return ("--lora", str(first), "--lora-scaled", f"{second}:0.5")


@pytest.fixture(scope="module")
def oracle(adapters: tuple[str, ...]) -> Iterator[Oracle]:
    """Asks a real llama-server."""
    try:
        server = llama_server(bundled_model(), *SMALL, *adapters)
    except ConfigError as error:
        pytest.skip(error.message)
    with server:
        yield Oracle(server.url)


@pytest.fixture
def served(make_daemon: MakeDaemon, adapters: tuple[str, ...]) -> Daemon:
    """A daemon with both."""
    return make_daemon(*SMALL, "--fidelity", "exact", *adapters).start()


def test_scales_of_a_request(served: Daemon, oracle: Oracle) -> None:
    """Every choice of scales has its own rows, and says what llama-server says; all zero is the
    bare model."""
    choices: tuple[Any, ...] = ([], FIRST, BARE, SECOND, [*FIRST, *SECOND])
    spoken = [said(ask(served.url, START, lora=lora)) for lora in choices]
    assert spoken == [oracle(START, lora) for lora in choices]
    assert len({tuple(ids) for ids in spoken}) == len(choices)
    for lora, ids in zip(choices, spoken, strict=True):
        again = ask(served.url, START, lora=lora)
        assert said(again) == ids
        assert reuse_of(again.headers)["prefill"] == 1


def test_zero_is_no_adapter(served: Daemon, make_daemon: MakeDaemon) -> None:
    bare = make_daemon(*SMALL, name="bare").start()
    assert said(ask(served.url, START, lora=BARE)) == said(ask(bare.url, START))


def test_nothing_is_shared(served: Daemon) -> None:
    """Neither live rows nor stored ones, nor of a public base."""
    base = {"name": "tale", "prompt": START, "public": True}
    served.post("/towerd/v1/precache", {**base})
    assert n_reused(ask(served.url, START + " It was", lora=BARE)) == 0
    assert n_reused(ask(served.url, START + " It was")) > 10
    assert n_reused(ask(served.url, START + " It was", lora=FIRST)) == 0
    assert served.get("/towerd/v1/bases")["bases"][0]["public"]


def test_set_between_turns(served: Daemon, oracle: Oracle) -> None:
    """A chat continues under other scales as if it had always been under them; under the first ones
    it finds its rows again."""
    first = ask(served.url, START, lora=FIRST)
    longer = START + first.json()["content"] + " Then"
    served.post("/lora-adapters", SECOND)
    assert [each["scale"] for each in served.get("/lora-adapters")] == [0.0, 0.3]
    changed = ask(served.url, longer)
    assert n_reused(changed) == 0
    assert said(changed) == oracle(longer, SECOND)
    back = ask(served.url, longer, lora=FIRST)
    assert n_reused(back) > 20
    assert said(back) == oracle(longer, FIRST)


def test_restart(served: Daemon, oracle: Oracle) -> None:
    """Rows outlive the daemon, under the scales they were made under."""
    for lora in (FIRST, SECOND):
        ask(served.url, START, lora=lora)
    served.stop()
    served.start()
    for lora in (FIRST, SECOND):
        again = ask(served.url, START + " And", lora=lora)
        assert n_reused(again) > 10
        assert said(again) == oracle(START + " And", lora)
    assert n_reused(ask(served.url, START + " And")) == 0


def test_side_by_side(served: Daemon, oracle: Oracle) -> None:
    """Requests under different scales run at once; each says what it says alone."""
    choices = (FIRST, SECOND, BARE, FIRST)
    with ThreadPoolExecutor(len(choices)) as pool:
        replies = list(pool.map(lambda lora: ask(served.url, START, lora=lora), choices))
    assert [said(reply) for reply in replies] == [oracle(START, lora) for lora in choices]


def test_frozen(served: Daemon, oracle: Oracle) -> None:
    """A chat that was frozen is evaluated again under the scales it had."""
    first = ask(served.url, START, lora=FIRST)
    name = first.headers["X-Towerd-Session"]
    longer = START + first.json()["content"] + " Then"
    served.post(f"/towerd/v1/sessions/{name}/freeze", {})
    served.stop()  # and its rows are live no more
    served.start()
    again = ask(served.url, longer, lora=FIRST)
    assert said(again) == oracle(longer, FIRST)
    assert again.headers["X-Towerd-Session"] == name
    assert reuse_of(again.headers)["cold"] > 10


def test_sessions_of_a_tenant(served: Daemon) -> None:
    """A conversation stays one, whatever the scales of its turns."""
    for lora in (FIRST, SECOND, BARE):
        headers = {"X-Towerd-Session": "tale"}
        body: Any = {"prompt": START, "n_predict": 4, "lora": lora}
        assert requests.post(served.url + "/completion", json=body, headers=headers).ok
    listed = served.get("/towerd/v1/sessions?scope=local")["sessions"]
    assert listed == served.get("/towerd/v1/sessions")["sessions"]
    assert [(each["id"], each["n_turns"]) for each in listed] == [("tale", 3)]
    assert len(served.get("/towerd/v1/sessions?scope=" + listed[0]["scope"])["sessions"]) == 1


def test_loaded_without_apply(make_daemon: MakeDaemon, adapters: tuple[str, ...]) -> None:
    daemon = make_daemon(*SMALL, *adapters, "--lora-init-without-apply").start()
    assert [each["scale"] for each in daemon.get("/lora-adapters")] == [0.0, 0.0]


def test_bad_requests(served: Daemon) -> None:
    before = served.get("/lora-adapters")
    served.post("/lora-adapters", {"id": 0}, 400)
    served.post("/completion", {"prompt": "x", "lora": 3}, 400)
    served.post("/completion", {"prompt": "x", "lora": [{"id": 0, "scale": 1e300}]}, 400)
    served.post("/lora-adapters", [{"id": 0, "scale": 10**400}], 400)
    served.post("/lora-adapters", FIRST * 10_000, 400)
    assert served.get("/lora-adapters") == before


def test_tenants_change_nothing(make_daemon: MakeDaemon, adapters: tuple[str, ...]) -> None:
    """What all share is the owner's to set."""
    daemon = make_daemon(*SMALL, *adapters, "--api-key", "alice:a").start()
    headers = {"Authorization": "Bearer a"}
    reply = requests.post(daemon.url + "/lora-adapters", json=FIRST, headers=headers, timeout=60)
    assert reply.status_code == 403


@pytest.mark.parametrize(
    "flags", [("--lora", "none.gguf"), ("--lora-scaled", "x.gguf"), ("--lora", "{model}")]
)
def test_bad_files(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """What is no adapter is refused at the start, in one sentence."""
    done = run_towerd(
        tmp_path, "serve", "--port", "0", *(flag.format(model=bundled_model()) for flag in flags)
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert ".gguf" in done.stderr
