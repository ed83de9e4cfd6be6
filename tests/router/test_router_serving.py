"""A router with real processes: loading on demand, making room, crashes, tenants."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from daemon import Daemon, reuse_of, run_towerctl
from routed import LONG, MakeRouter, ask, children, metric, states
from waiting import until

from towerd.cli.doctor import store as doctor
from towerd.router.loading.launcher import CONTEXT_RAM_SHARE
from towerd.settings.config import Config
from towerd.system.machine import ram_bytes


def test_a_request_waits_for_its_model(make_router: MakeRouter) -> None:
    """However many wait, it is loaded once; a request without a model goes to the only loaded one."""
    router = make_router("--ui-config", '{"theme": "dark"}')
    assert set(states(router).values()) == {"unloaded"}
    assert router.get("/props")["ui_settings"] == {"theme": "dark"}
    missing = ask(router, None)
    assert (missing.status_code, missing.json()["error"]["message"]) == (
        400,
        "model name is missing from the request",
    )
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: ask(router, "tales"), range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert states(router) == {"tales": "loaded", "dice": "unloaded", "junk": "unloaded"}
    assert metric(router, "towerd_model_loads_total") == 1
    assert ask(router, None).json()["model"] == "tales"
    props = router.get("/props?model=tales")
    assert (props["model_alias"], props["ui_settings"]) == ("tales", {"theme": "dark"})
    assert router.get("/v1/models")["data"][2]["meta"]["n_ctx"] == 2048
    assert router.stop() == 0, router.log
    with router.stored():
        pass


def test_one_log_file(make_router: MakeRouter, tmp_path: Path) -> None:
    """The models' lines are in it, which say which model."""
    path = tmp_path / "all.log"
    router = make_router("--log-file", str(path))
    assert ask(router, "tales").status_code == 200
    until(lambda: "request: " in path.read_text())
    (line,) = [each for each in path.read_text().splitlines() if "request: " in each]
    assert "model=tales" in line


def test_a_log_that_cannot_be_written(make_router: MakeRouter, tmp_path: Path) -> None:
    """Its folder leaves under a running router: clients get the reason in a sentence."""
    folder = tmp_path / "logs"
    folder.mkdir()
    router = make_router("--log-file", str(folder / "all.log"))
    folder.rename(tmp_path / "elsewhere")
    reply = ask(router, "tales")
    assert reply.status_code == 500
    message = f"Cannot write the log to {folder / 'all.log'}: No such file or directory."
    assert reply.json()["error"]["message"] == message


def test_an_unknown_model(make_router: MakeRouter) -> None:
    router = make_router()
    reply = ask(router, "nobody")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (404, 404, "not_found_error")
    assert error["models"] == ["dice", "junk", "tales"]
    assert requests.get(router.url + "/no-such-file.ico", timeout=30).status_code == 404
    assert children(router) == set()


def test_room_for_one(make_router: MakeRouter) -> None:
    """Two asked for at once both answer; going back to a chat evaluates nothing again."""
    router = make_router("--models-max", "1")
    first = ask(router, "tales", LONG)
    n_tokens = first.json()["tokens_evaluated"]
    assert n_tokens > 100
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda name: ask(router, name, LONG), ["dice", "tales"]))
    assert [reply.status_code for reply in replies] == [200, 200]
    assert len(children(router)) == 1
    for name in ("tales", "dice", "tales"):
        reuse = reuse_of(ask(router, name, LONG).headers)
        assert reuse["prefill"] <= 1, (name, reuse)
    assert replies[1].json()["content"] == first.json()["content"]


def test_a_model_that_is_never_idle_leaves_for_another(make_router: MakeRouter) -> None:
    """Its requests overlap without end; the other model gets its turn all the same."""
    router = make_router("--models-max", "1")
    ask(router, "tales")
    is_over = threading.Event()

    def chat() -> list[int]:
        statuses = []
        while not is_over.is_set():
            statuses.append(ask(router, "tales", n_predict=200).status_code)
        return statuses

    with ThreadPoolExecutor(3) as pool:
        chats = [pool.submit(chat) for _ in range(3)]
        try:
            assert ask(router, "dice").status_code == 200
        finally:
            is_over.set()
        assert {status for each in chats for status in each.result()} == {200}


def test_the_memory_bounds_what_is_loaded(make_router: MakeRouter) -> None:
    """Models leave for want of memory too, the kept one never."""
    toml = "[models.tales]\nkeep = true\n[models.other]\nmodel = 'stories'\ncache_type_k = 'bf16'\n"
    router = make_router("--memory", "64GiB", "--hot-bytes", "64MiB", toml=toml)
    for name in ("tales", "dice", "other"):
        reply = ask(router, name)
        assert reply.status_code == 200, reply.text
    assert len(children(router)) == 3
    tight = make_router("--memory", "1MiB", "--hot-bytes", "64MiB", toml=toml, name="tight")
    assert ask(tight, "dice").status_code == 200
    assert ask(tight, "tales").status_code == 200
    assert states(tight)["dice"] == "unloaded"
    refused = ask(tight, "dice")
    assert refused.status_code == 500
    assert "no room for the model dice beside those that are kept: tales" in refused.text
    assert states(tight)["tales"] == "loaded"


def test_chats_that_left_the_context_count_as_memory(make_router: MakeRouter) -> None:
    """What a retention may keep of them, 3 GiB for each model, is more than the two have room for."""
    memory = ram_bytes() // CONTEXT_RAM_SHARE + 2 * 2**30  # of the second its context is estimated
    flags = ("--memory", str(memory), "--hot-bytes", "64MiB", "--recall-bytes", "1GiB")
    router = make_router(*flags, "--retention", "streaming")
    for name in ("tales", "dice"):
        assert ask(router, name).status_code == 200
    assert states(router)["tales"] == "unloaded"
    assert "up to 3,072 MiB for what left the context (--recall-bytes)" in router.log
    roomy = make_router(*flags, name="roomy")
    for name in ("tales", "dice"):
        assert ask(roomy, name).status_code == 200
    assert states(roomy)["tales"] == "loaded"


def test_a_killed_model_takes_no_others_answers(make_router: MakeRouter) -> None:
    router = make_router()
    ask(router, "tales")
    (tales,) = children(router)
    ask(router, "dice")
    (dice,) = children(router) - {tales}
    seen: dict[str, list[Any]] = {"tales": [], "dice": []}
    begun = {name: threading.Event() for name in seen}

    def stream(model: str) -> None:
        body: dict[str, Any] = {"model": model, "prompt": LONG, "n_predict": 1000, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        with requests.post(
            router.url + "/completion", json=body, stream=True, timeout=120
        ) as reply:
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    seen[model].append(json.loads(line[6:]))
                    begun[model].set()

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, name) for name in seen]
        for event in begun.values():
            assert event.wait(60)
        os.kill(dice, signal.SIGKILL)
        for each in streams:
            each.result()
    assert seen["tales"][-1]["stop"]
    assert sum(len(each["tokens"]) for each in seen["tales"]) >= 999
    assert seen["dice"][-1]["error"]["code"] == 500
    assert "dice ended while it answered" in seen["dice"][-1]["error"]["message"]
    again = ask(router, "dice")
    assert again.status_code == 200, again.text
    assert metric(router, "towerd_model_crashes_total") == 1
    assert children(router) > {tales}


def test_a_process_that_accepts_no_connection_for_a_while(make_router: MakeRouter) -> None:
    """It is asked again, and not killed with all that it has."""
    router = make_router()
    url = router.url + "/completion"
    body: Any = {"model": "tales", "prompt": LONG, "n_predict": 1400, "ignore_eos": True}
    body["stream"] = True
    ask(router, "tales")
    (pid,) = children(router)
    used = (Path(str(each.laddr)) for each in psutil.Process(pid).net_connections("unix"))
    (folder,) = {each.parent for each in used if "towerd-models-" in str(each)}
    (socket,) = folder.iterdir()
    with (
        ThreadPoolExecutor(1) as pool,
        requests.post(url, json=body, stream=True, timeout=120) as running,
    ):
        lines = running.iter_lines()
        next(lines)  # it has the connection that was kept
        hidden = socket.rename(socket.with_name("hidden"))
        asked = pool.submit(ask, router, "tales")
        until(lambda: "accepted no connection" in router.log)
        hidden.rename(socket)
        assert asked.result().status_code == 200
        assert children(router) == {pid}
        assert json.loads([line for line in lines if line][-1][6:])["stop"]


def test_the_processes_end_with_the_router(make_router: MakeRouter) -> None:
    router = make_router()
    ask(router, "tales")
    (pid,) = children(router)
    router.kill()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    with router.stored() as store:
        assert len(store.sessions()) == 1


def test_models_have_the_session_and_not_the_signals_of_the_router(
    make_router: MakeRouter,
) -> None:
    """^C in a terminal is for the router, which stops them in order; the priority of their threads
    counts among all of them, and Linux lets it count within one session only."""
    router = make_router()
    ask(router, "tales")
    (pid,) = children(router)
    assert os.getsid(pid) == os.getsid(router.pid)
    assert os.getpgid(pid) != os.getpgid(router.pid)


def test_an_idle_model_leaves(make_router: MakeRouter) -> None:
    """GETs do not keep it."""
    router = make_router(toml="[models.tales]\nidle_s = 0.5\n[models.dice]\n")
    ask(router, "tales")

    def is_gone() -> bool:
        requests.get(router.url + "/props?model=tales&autoload=0", timeout=30)
        return states(router)["tales"] == "unloaded"

    until(is_gone)
    assert ask(router, "tales").status_code == 200


def test_one_file_with_two_settings(make_router: MakeRouter, models_dir: Path) -> None:
    """They take turns, each with its settings, also where there is room for both."""
    toml = f"[models.brief]\nmodel = '{models_dir}/tales.gguf'\nhot_bytes = '1MiB'\n"
    router = make_router(toml=toml)
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(lambda name: ask(router, name, LONG), ["tales", "brief"]))
        assert [(each.status_code, each.text) for each in replies if each.status_code != 200] == []
    assert len(children(router)) == 1


def test_a_request_that_arrives_as_its_model_leaves(make_router: MakeRouter) -> None:
    """Its process has not read the request when it is unloaded: it answers before it ends."""
    router = make_router()
    body = json.dumps({"model": "tales", "prompt": LONG, "n_predict": 4})
    for _ in range(3):
        ask(router, "tales")
        (pid,) = children(router)
        os.kill(pid, signal.SIGSTOP)
        client = HTTPConnection(router.url.removeprefix("http://"), timeout=100)
        client.request("POST", "/completion", body)
        router.post("/models/unload", {"model": "tales"})
        reply = client.getresponse()
        assert reply.status == 200, reply.read()
        client.close()
        until(partial(_has_left, router, pid))


def _has_left(router: Daemon, pid: int) -> bool:
    return pid not in children(router)


def test_a_workflow_ends_in_all_models(make_router: MakeRouter) -> None:
    """Also in one that was not used last."""
    router = make_router()
    body: dict[str, Any] = {"model": "tales", "prompt": LONG, "n_predict": 1}
    headers = {"X-Towerd-Workflow": "w1", "X-Towerd-Agent": "a"}
    requests.post(router.url + "/completion", json=body, headers=headers, timeout=60)
    ask(router, "dice")
    end = router.url + "/towerd/v1/workflows/w1/end"
    assert requests.post(end, timeout=60).json()["ended"]["id"] == "w1"
    again = requests.post(end, timeout=60)
    assert (again.status_code, again.json()["error"]["type"]) == (404, "not_found_error")


def test_any_model_is_asked_about_a_request(make_router: MakeRouter) -> None:
    """Only the one that answered it knows why it evaluated what it did."""
    router = make_router()
    ask(router, "tales")
    (request,) = router.get("/towerd/v1/requests?model=tales")["finished"]
    ask(router, "dice")
    found = router.get(f"/towerd/v1/requests/{request['id']}/why")
    assert found["request"] == request
    unknown = requests.get(router.url + "/towerd/v1/requests/unknown/why", timeout=60)
    assert unknown.status_code == 404


def test_no_autoload(make_router: MakeRouter) -> None:
    router = make_router("--no-models-autoload")
    reply = ask(router, "tales")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "model is not loaded")
    router.post("/models/load", {"model": "tales"})
    until(lambda: states(router)["tales"] == "loaded")
    assert ask(router, "tales").status_code == 200


def test_an_embedding_model_beside_a_chat_model(make_router: MakeRouter) -> None:
    """Every model has settings of its own."""
    router = make_router(toml="[models.dice]\nembeddings = true\npooling = 'mean'\nalias = 'emb'\n")
    found = router.post("/v1/embeddings", {"model": "emb", "input": "a small dog"})
    assert len(found["data"][0]["embedding"]) == 256
    assert ask(router, "tales").status_code == 200
    refused = requests.post(
        router.url + "/v1/embeddings", json={"model": "tales", "input": "x"}, timeout=60
    )
    assert refused.status_code >= 400
    assert len(children(router)) == 2


def test_tenants_stay_apart(make_router: MakeRouter) -> None:
    """A key is its tenant's in the model's process too; the owner is who comes over the socket."""
    router = make_router("--api-key", "ann:a", "--api-key", "bob:b")

    def call(method: str, path: str, key: str, **more: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}", "X-Towerd-Caller": "owner"}
        return requests.request(method, router.url + path, headers=headers, timeout=60, **more)

    body = {"model": "tales", "prompt": LONG, "n_predict": 4}
    assert call("POST", "/completion", "wrong", json=body).status_code == 401
    assert call("POST", "/completion", "a", json=body).status_code == 200
    again = call("POST", "/completion", "b", json=body)
    assert reuse_of(again.headers)["prefill"] > 100
    for key, name in (("a", "ann"), ("b", "bob")):
        listed = call("GET", "/towerd/v1/sessions", key).json()["sessions"]
        assert [each["scope"] for each in listed] == [name]
    assert call("GET", "/towerd/v1/pins", "a").status_code == 403
    assert call("GET", "/models?reload=1", "a").status_code == 403
    assert call("POST", "/models/unload", "a", json={"model": "tales"}).status_code == 403
    assert call("POST", "/models/load", "a", json={"model": "dice"}).status_code == 200
    listed = json.loads(run_towerctl(router, "sessions", "ls", "--json").stdout)
    assert {each["scope"] for each in listed["sessions"]} == {"ann", "bob"}


def test_a_form_names_its_model(make_router: MakeRouter) -> None:
    """Audio comes as a form; the model of it answers, that it cannot."""
    router = make_router()
    reply = requests.post(
        router.url + "/v1/audio/transcriptions",
        files={"file": ("a.wav", b"\r\n\r\nRIFF", "audio/wav")},
        data={"model": "tales"},
        timeout=60,
    )
    assert states(router)["tales"] == "loaded", reply.text
    assert reply.json()["error"]["type"] == "not_supported_error"


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"model": 5}'])
def test_a_body_without_a_model(make_router: MakeRouter, body: bytes) -> None:
    router = make_router()
    reply = requests.post(router.url + "/completion", data=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_resumable_stream(make_router: MakeRouter) -> None:
    """Its client may leave while the model is loading; the stream is there when it comes back."""
    router = make_router()
    body: dict[str, Any] = {"model": "tales", "prompt": "Once", "n_predict": 20, "stream": True}
    headers = {"X-Conversation-Id": "c1"}
    with pytest.raises(requests.ReadTimeout):
        requests.post(
            router.url + "/completion", json=body, headers=headers, timeout=(5, 0.05), stream=True
        )
    until(lambda: states(router)["tales"] == "loaded")

    def listed() -> list[dict[str, Any]]:
        return list(router.post("/v1/streams/lookup", {"conversation_ids": ["c1", "c2"]}))

    until(lambda: bool(listed()) and listed()[0]["is_done"])
    text = requests.get(router.url + "/v1/stream?conv_id=c1", timeout=60).text
    assert text.count("data: ") >= 10
    gone = requests.delete(router.url + "/v1/stream?conv_id=c1", timeout=60)
    assert gone.status_code == 204
    assert requests.get(router.url + "/v1/stream?conv_id=c1", timeout=60).status_code == 404


READS = (
    "/towerd/v1/stats",
    "/towerd/v1/sessions?model=dice",
    *(f"{path}?model=dice" for path in ("/slots", "/props", "/metrics", "/lora-adapters")),
)


def test_reading_loads_no_model(make_router: MakeRouter) -> None:
    """One that is loaded answers for the store. If none is, the one to load is named, and a query can
    say that it is to be loaded."""
    router = make_router()
    ask(router, "dice")
    router.post("/models/unload", {"model": "dice"})
    until(lambda: states(router)["dice"] == "unloaded")
    said = run_towerctl(router, "stats")
    assert said.returncode == 1
    assert "No model is loaded" in said.stderr
    assert "such as dice, and ask again" in said.stderr
    for path in READS:
        for method in ("GET", "HEAD"):
            assert requests.request(method, router.url + path, timeout=60).status_code == 400, path
    assert set(states(router).values()) == {"unloaded"}
    ask(router, "tales")
    assert "tales" in run_towerctl(router, "stats").stdout
    assert len(router.get("/towerd/v1/sessions")["sessions"]) == 2
    assert states(router) == {"tales": "loaded", "dice": "unloaded", "junk": "unloaded"}
    router.get("/slots?model=dice&autoload=1")
    assert states(router) == {"tales": "loaded", "dice": "loaded", "junk": "unloaded"}


def test_what_towerctl_shows_of_a_router(make_router: MakeRouter) -> None:
    """doctor finds nothing wrong if no model is loaded; top shows the slots of one of two."""
    router = make_router()
    config = Config(store_dir=router.store_dir, socket=router.socket)
    found = doctor.daemon(config)
    assert (found.status, "0 of 3 models are loaded" in found.found) == ("OK", True)
    ask(router, "dice")
    ask(router, "tales")
    assert "2 of 3 models are loaded" in doctor.daemon(config).found
    shown = run_towerctl(router, "top", "--once").stdout
    assert "tales, context" in shown
    assert "slots are idle." in shown


def test_reading_a_model_that_has_to_leave(make_router: MakeRouter) -> None:
    """It takes no new requests until another has had its turn, but is there to be looked at."""
    toml = "[models.other]\nmodel = 'stories'\ncache_type_k = 'bf16'\n"
    router = make_router("--models-max", "1", "-c", "65536", toml=toml)
    body: Any = {"model": "tales", "prompt": "Once", "n_predict": 60_000, "ignore_eos": True}
    url = router.url + "/completion"
    with (
        ThreadPoolExecutor(2) as pool,
        requests.post(url, json=body | {"stream": True}, stream=True, timeout=60) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        waiting = [pool.submit(ask, router, "other")]
        until(lambda: metric(router, "towerd_model_requests_waiting") == 1)
        while metric(router, "towerd_model_requests_waiting") < 2:
            if len(waiting) == 1 or waiting[-1].done():
                waiting.append(pool.submit(ask, router, "tales"))
        slots = router.get("/slots?model=tales")
        assert sum(slot["is_processing"] for slot in slots) == 1
        assert metric(router, "towerd_model_requests_waiting") == 2
        running.close()
        assert {each.result().status_code for each in waiting} == {200}
