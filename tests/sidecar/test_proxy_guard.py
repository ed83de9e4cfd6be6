"""Whose keys, slots, pages and conversations pass through the proxy, and whose do not."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from daemon import Daemon

MakeDaemon = Callable[..., Daemon]
ANN, BOB = {"Authorization": "Bearer sk-ann"}, {"X-Api-Key": "sk-bob"}
KEYS = ("--api-key", "ann:sk-ann", "--api-key", "bob:sk-bob")
UI = {"index.html": "<html>chat</html>", "app.js": "alert(1)", "notes.txt": "not for all"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two tenants before a llama-server that has a web UI of three files."""
    root = tmp_path_factory.mktemp("guarded")
    public = root / "public"
    public.mkdir()
    for name, text in UI.items():
        (public / name).write_text(text)
    flags = ("--engine", "llama-server", "-c", "1024", "-np", "2", "-t", "1", *KEYS)
    with Daemon(root / "d", *flags, "--", "--path", str(public)) as daemon:
        yield daemon


def llama_server_of(daemon: Daemon) -> psutil.Process:
    """The child of a towerd."""
    (child,) = [
        each for each in psutil.Process(daemon.pid).children() if each.name() == "llama-server"
    ]
    return child


def private_key(daemon: Daemon) -> str:
    key = llama_server_of(daemon).environ()["LLAMA_API_KEY"]
    assert len(key) > 20
    return key


ENDPOINTS: list[tuple[str, str, Any]] = [
    ("POST", "/completion", {"prompt": "a", "n_predict": 2}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("POST", "/v1/embeddings", {"input": "a"}),
    ("POST", "/tokenize", {"content": "a"}),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/v1/models", None),
    ("GET", "/metrics", None),
    ("GET", "/lora-adapters", None),
    ("GET", "/v1/stream", None),
    ("POST", "/slots/0?action=erase", {}),
    ("POST", "/lora-adapters", []),
    ("GET", "/no/such/path", None),
    ("POST", "/no/such/path", {}),
    ("GET", "/notes.txt", None),
    ("GET", "/towerd/v1/stats", None),
    ("GET", "/towerd/v1/app.js", None),
    ("GET", "/v1/responses/app.js", None),
    ("DELETE", "/responses/resp_1", None),
    ("GET", "/conversations/app.js/items", None),
    ("POST", "/v1/conversations", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), ENDPOINTS)
def test_key_required(guarded: Daemon, method: str, path: str, body: Any) -> None:
    """Nothing reaches llama-server without a key of towerd's, and its own key is not one."""
    private = {"Authorization": f"Bearer {private_key(guarded)}"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, private):
        reply = requests.request(method, guarded.url + path, json=body, headers=headers, timeout=30)
        assert reply.status_code == 401, path
        assert reply.json()["error"]["message"] == "Invalid API Key"


def test_private_key_stays_private(guarded: Daemon) -> None:
    """It is in no reply, no log and no command line."""
    key = private_key(guarded)
    for method, path, body in ENDPOINTS:
        reply = requests.request(method, guarded.url + path, json=body, headers=ANN, timeout=30)
        assert reply.status_code != 401
        assert key not in reply.text
        assert key not in str(reply.headers)
    assert key not in guarded.log
    assert key not in " ".join(llama_server_of(guarded).cmdline())
    assert key not in " ".join(psutil.Process(guarded.pid).cmdline())


def test_web_ui_needs_no_key(guarded: Daemon) -> None:
    """A browser loads the page before anybody can type a key."""
    assert requests.get(guarded.url + "/", timeout=30).text == UI["index.html"]
    for name in ("app.js", "notes.txt"):
        reply = requests.get(f"{guarded.url}/{name}", headers=BOB, timeout=30)
        assert (reply.status_code, reply.text) == (200, UI[name])
    # llama-server itself says which files are its UI's; those of --path are not.
    assert requests.get(guarded.url + "/app.js", timeout=30).status_code == 401
    assert requests.post(guarded.url + "/app.js", json={}, timeout=30).status_code == 401


def test_status_page_without_a_web_ui(sidecar: Daemon) -> None:
    """A llama-server built without its UI: the bare address leads to towerd's page."""
    reply = requests.get(sidecar.url + "/", timeout=30, allow_redirects=False)
    assert (reply.status_code, reply.headers["Location"]) == (302, "/towerd/")
    assert "towerd" in requests.get(sidecar.url + "/", timeout=30).text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/lora-adapters", []),
        ("POST", "/props", {}),
        ("POST", "/models/load", {}),
        ("DELETE", "/models", None),
    ],
)
def test_what_changes_all_is_the_owners(guarded: Daemon, method: str, path: str, body: Any) -> None:
    """A tenant's key does not change the model under the others."""
    reply = requests.request(method, guarded.url + path, json=body, headers=ANN, timeout=30)
    assert reply.status_code == 403
    assert reply.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("path", ["/completion", "/props", "/no/such/path", "/app.js"])
def test_foreign_pages_and_hosts(guarded: Daemon, path: str) -> None:
    """DNS rebinding and other sites' pages are refused before anything is sent on."""
    method = "GET" if path != "/completion" else "POST"
    body: Any = {"prompt": "a", "n_predict": 1} if method == "POST" else None
    for bad in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        reply = requests.request(
            method, guarded.url + path, json=body, headers=ANN | bad, timeout=30
        )
        assert reply.status_code == 403
        assert "Access-Control-Allow-Origin" not in reply.headers
    good = ANN | {"Origin": "http://localhost:3000"}
    reply = requests.request(method, guarded.url + path, json=body, headers=good, timeout=30)
    assert reply.status_code in (200, 404)
    assert reply.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert "Access-Control-Allow-Credentials" not in reply.headers
    assert reply.headers["Server"] == "towerd"


def test_streams_carry_cors(guarded: Daemon) -> None:
    body: Any = {"prompt": "a", "n_predict": 2, "stream": True}
    headers = ANN | {"Origin": "http://localhost:3000"}
    reply = requests.post(guarded.url + "/completion", json=body, headers=headers, timeout=30)
    assert reply.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
    preflight = headers | {"Access-Control-Request-Headers": "x-conversation-id"}
    reply = requests.options(guarded.url + "/v1/chat/completions", headers=preflight, timeout=30)
    assert reply.headers["Access-Control-Allow-Headers"] == "x-conversation-id"


@pytest.mark.parametrize("slot", [0, 1, -1, 77, "0", None])
def test_clients_choose_no_slot(sidecar: Daemon, slot: Any) -> None:
    """`id_slot` is towerd's, however often and however it is written."""
    body = {"prompt": "a", "n_predict": 1, "id_slot": slot}
    assert sidecar.post("/completion", body)["id_slot"] in (0, 1)
    text = '{"id_slot":1,"prompt":"a","n_predict":1,"\\u0069d_slot":1}'
    reply = requests.post(sidecar.url + "/completion", data=text, timeout=30)
    assert reply.json()["id_slot"] in (0, 1)


@pytest.mark.parametrize("action", ["save", "restore", "erase", "explode"])
@pytest.mark.parametrize("path", ["/slots/0", "/slots/99", "/%73lots/0", "/slots%2F0", "/slots/0/"])
def test_clients_move_no_slot(sidecar: Daemon, path: str, action: str) -> None:
    """Slot actions do not reach llama-server, in no spelling of the path: any of them would
    empty a slot, or leave a file."""

    def held() -> list[int]:
        return [slot["n_prompt_tokens"] for slot in sidecar.get("/slots")]

    sidecar.complete("keep me in my slot", 1)
    before = held()
    host, port = sidecar.url.removeprefix("http://").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        body = json.dumps({"filename": "stolen"})
        connection.request("POST", f"{path}?action={action}", body)
        reply = connection.getresponse()
        error = json.loads(reply.read())["error"]
    assert (reply.status, error["type"]) in ((400, "not_supported_error"), (404, "not_found_error"))
    assert held() == before
    assert sum(before) > 0
    flags = llama_server_of(sidecar).cmdline()
    slot_dir = Path(flags[flags.index("--slot-save-path") + 1])
    assert not (slot_dir / "stolen").exists()


def test_conversations_are_each_tenants_own(guarded: Daemon) -> None:
    """Two tenants may use one conversation id and never see the other's words."""
    for key, word in ((ANN, "Ann"), (BOB, "Bob")):
        body: Any = {"prompt": f"{word} went", "n_predict": 2, "stream": True}
        headers = key | {"X-Conversation-Id": "shared", "Content-Type": "application/json"}
        requests.post(guarded.url + "/completion", json=body, headers=headers, timeout=30)
    url = guarded.url + "/v1/stream?conv_id=shared&from=0"
    for key, word, other in ((ANN, "Ann", "Bob"), (BOB, "Bob", "Ann")):
        text = requests.get(url, headers=key, timeout=30).text
        assert f"{word} went" in text
        assert other not in text
        found = requests.post(
            guarded.url + "/v1/streams/lookup",
            headers=key,
            timeout=30,
            json={"conversation_ids": ["shared", "ann/shared", "bob/shared", "../ann/shared"]},
        ).json()
        assert [stream["conversation_id"] for stream in found] == ["shared"]
    assert requests.delete(url, headers=ANN, timeout=30).status_code == 204
    assert requests.get(url, headers=ANN, timeout=30).status_code == 404
    assert requests.get(url, headers=BOB, timeout=30).status_code == 200


def test_no_tenant_learns_what_others_asked(guarded: Daemon) -> None:
    """What one tenant asked is not cached for another, and the reply says so."""
    body: Any = {"prompt": "The secret of the old house " * 4, "max_tokens": 1}
    for key in (ANN, BOB):
        reply = requests.post(guarded.url + "/v1/completions", json=body, headers=key, timeout=30)
        details = reply.json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] <= 1  # BOS is no secret


def test_body_limits(make_sidecar: MakeDaemon) -> None:
    """A body over the limit is refused, whether its size is told or not, and on its way."""
    with make_sidecar("--request-bytes-max", "2048") as daemon:
        big = json.dumps({"prompt": "a" * 4000, "content": "b" * 4000}).encode()
        for path in ("/completion", "/tokenize", "/v1/embeddings", "/no/such/path"):
            for data in (big, iter([big[:3000], big[3000:]])):
                reply = requests.post(daemon.url + path, data=data, timeout=30)
                if reply.status_code == 404 and path == "/no/such/path" and data is not big:
                    continue  # llama-server said so before it was sent any of the body
                assert reply.status_code == 413, path
                assert reply.json()["error"]["type"] == "invalid_request_error"
        assert daemon.complete("still here", 1)["tokens"]


def test_bodies_without_a_length(sidecar: Daemon) -> None:
    """A chunked upload passes through like any other."""

    def parts(body: Any) -> Iterator[bytes]:
        data = json.dumps(body).encode()
        yield from (data[i : i + 7] for i in range(0, len(data), 7))

    reply = requests.post(
        sidecar.url + "/tokenize", data=parts({"content": "Once upon"}), timeout=30
    )
    assert reply.json() == sidecar.post("/tokenize", {"content": "Once upon"})
    body = {"prompt": "Once", "n_predict": 2}
    reply = requests.post(sidecar.url + "/completion", data=parts(body), timeout=30)
    assert reply.json()["tokens_predicted"] == 2


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"null"])
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/messages", "/infill"])
def test_bodies_that_are_no_requests(sidecar: Daemon, path: str, data: bytes) -> None:
    """An error in the shape of the API, and the next request is answered."""
    reply = requests.post(sidecar.url + path, data=data, timeout=30)
    assert reply.status_code in (400, 500, 501)
    fields = {"message", "type"} if path == "/v1/messages" else {"code", "message", "type"}
    assert set(reply.json()["error"]) >= fields
    assert sidecar.get("/health") == {"status": "ok"}


def test_own_paths_are_not_sent_on(sidecar: Daemon) -> None:
    """A path below /towerd that towerd does not have does not exist."""
    reply = requests.get(sidecar.url + "/towerd/no/such", timeout=30)
    assert reply.json() == {
        "error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}
    }
