"""API keys with tenants: no tenant sees or profits from another's state; public bases are
shared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from daemon import Daemon, clean_env, reuse_of

ANN, BOB = {"Authorization": "Bearer sk-ann"}, {"Authorization": "Bearer sk-bob"}
BASE_TEXT = "You are the keeper of a lighthouse. You speak slowly and you love the sea. " * 3


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a key for each of two tenants."""
    with Daemon(tmp_path, "--api-key", "ann:sk-ann", "--api-key", "bob:sk-bob") as daemon:
        yield daemon
        assert daemon.stop() == 0
    with daemon.stored():
        pass


def owner_post(daemon: Daemon, path: str, body: Any) -> Any:
    """A POST over the Unix socket, where the owner needs no key."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(daemon.socket))) as client:
        reply = client.post("http://towerd" + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(
    daemon: Daemon, key: dict[str, str], prompt: Any, **fields: Any
) -> tuple[dict[str, Any], dict[str, int], str]:
    """Reply, reuse and session of a completion."""
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0, "return_tokens": True, **fields}
    reply = requests.post(daemon.url + "/completion", json=body, headers=key, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json(), reuse_of(reply.headers), reply.headers["X-Towerd-Session"]


def sessions(daemon: Daemon, key: dict[str, str]) -> set[str]:
    return {each["id"] for each in daemon.get("/towerd/v1/sessions", headers=key)["sessions"]}


@pytest.mark.parametrize("where", ["live", "stored"])
def test_no_reuse_across_tenants(guarded: Daemon, where: str) -> None:
    """The same prompt is new to the other tenant, whether the first one's rows are live or on
    disk; its own second time is not."""
    text = "A secret that only Ann knows, told at great length, twice over."
    first, _, ann_session = ask(guarded, ANN, text)
    if where == "stored":
        assert guarded.stop() == 0
        guarded.start()
    second, reuse, bob_session = ask(guarded, BOB, text)
    assert second["timings"]["cache_n"] == 0
    assert reuse == {"live": 0, "hot": 0, "warm": 0, "prefill": second["tokens_evaluated"]}
    assert second["tokens"] == first["tokens"], "the answer is the same all the same"
    for key in (ANN, BOB):
        again, _, _ = ask(guarded, key, text)
        assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1
    assert ann_session != bob_session
    assert sessions(guarded, ANN) == {ann_session}
    assert sessions(guarded, BOB) == {bob_session}


def test_other_tenants_do_not_exist(guarded: Daemon) -> None:
    """By no name and in no list: sessions, segments, the trie; and nothing can be changed."""
    headers = {"X-Towerd-Session": "diary"}
    ask(guarded, ANN | headers, "Dear diary, today I saw a whale.")
    segments = guarded.get("/towerd/v1/segments", headers=ANN)["segments"]
    assert segments
    assert guarded.get("/towerd/v1/segments?scope=ann", headers=BOB)["segments"] == []
    assert guarded.get("/towerd/v1/trie", headers=BOB)["trie"] == []
    for path in ("sessions/diary", f"segments/{segments[0]['id']}"):
        reply = requests.get(f"{guarded.url}/towerd/v1/{path}", headers=BOB, timeout=10)
        assert reply.status_code == 404, path
    reply = requests.delete(f"{guarded.url}/towerd/v1/sessions/diary", headers=BOB, timeout=10)
    assert reply.status_code == 404
    ask(guarded, BOB | headers, "Bob's own diary of the same name.")
    assert "whale" in guarded.get("/towerd/v1/sessions/diary?text=1", headers=ANN)["text"]
    assert "whale" not in guarded.get("/towerd/v1/sessions/diary?text=1", headers=BOB)["text"]
    reply = requests.post(f"{guarded.url}/towerd/v1/gc", json={}, headers=ANN, timeout=10)
    assert reply.status_code == 403


def test_tenant_comes_from_the_key_only(guarded: Daemon) -> None:
    """Nothing in a body or a header moves a request into another scope."""
    text = "Ann's long and private words about the storm of last winter."
    ask(guarded, ANN, text)
    forged = BOB | {"X-Towerd-Tenant": "ann", "X-Towerd-Scope": "ann"}
    reply, _, _ = ask(guarded, forged, text, scope="ann", tenant="ann", user="ann", id_slot=0)
    assert reply["timings"]["cache_n"] == 0


def test_public_base_is_shared(guarded: Daemon) -> None:
    """Both tenants find it, live and after a restart, and it lies in the store once; what they
    say after it stays their own."""
    made = owner_post(
        guarded, "/towerd/v1/precache", {"name": "keeper", "prompt": BASE_TEXT, "public": True}
    )
    n_base = made["base"]["tokens"]
    assert n_base > 100
    for restarts in (False, True):
        if restarts:
            assert guarded.stop() == 0
            guarded.start()
        for key, name in ((ANN, "Ann"), (BOB, "Bob")):
            words = BASE_TEXT + f" The guest {restarts} is {name}."
            reply, _, _ = ask(guarded, key, words)
            # The text may be cut into other tokens where the base ends.
            assert reply["timings"]["cache_n"] >= n_base - 2, (name, restarts)
    after = BASE_TEXT + " A word for Ann alone, and it is a long one."
    ask(guarded, ANN, after)
    reply, _, _ = ask(guarded, BOB, after)
    assert n_base - 2 <= reply["timings"]["cache_n"] <= n_base + 2
    shared = [
        segment
        for segment in guarded.get("/towerd/v1/segments?limit=1000", headers=BOB)["segments"]
        if segment["scope"] == "public"
    ]
    assert sum(segment["tokens"] for segment in shared) == n_base


def test_private_base_is_not_shared(guarded: Daemon) -> None:
    """A base that was not made public belongs to the owner alone."""
    body = {"name": "mine", "prompt": BASE_TEXT}
    owner_post(guarded, "/towerd/v1/precache", body)
    reply, _, _ = ask(guarded, ANN, BASE_TEXT + " Hello.")
    assert reply["timings"]["cache_n"] == 0


def test_towerctl_precache(guarded: Daemon, tmp_path: Path) -> None:
    """`towerctl precache` enters a tree of public prompts, which every tenant then finds."""
    spec = tmp_path / "bases.yaml"
    spec.write_text(
        f"platform:\n  name: house\n  public: true\n  text: {BASE_TEXT!r}\n"
        "  communities:\n    - name: sea\n"
        "      text: ' You only talk about fish and boats and the weather.'\n"
    )
    towerctl = str(Path(sys.executable).with_name("towerctl"))
    env = clean_env(tmp_path) | {"TOWERD_SOCKET": str(guarded.socket)}
    done = subprocess.run(
        [towerctl, "precache", str(spec)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "house/sea" in done.stdout
    words = BASE_TEXT + " You only talk about fish and boats and the weather."
    for key in (ANN, BOB):
        reply, _, _ = ask(guarded, key, words + " Hi!")
        assert reply["timings"]["cache_n"] >= reply["tokens_evaluated"] - 8
