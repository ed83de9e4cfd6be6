"""Daemons that share through an object store, and what a person asks of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from daemon import Daemon, reuse_of, run_towerctl

TALE = "Once upon a time there was a little girl named Lily. She had a dog. " * 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where daemons share."""

    url: str
    env: Mapping[str, str] = field(default_factory=dict)

    def flags(self, key: Path | None = None) -> list[str]:
        return ["--shared", self.url, *([] if key is None else ["--shared-key", str(key)])]


def ids_of(daemon: Daemon, text: str) -> list[int]:
    ids: list[int] = daemon.post("/tokenize", {"content": text, "add_special": True})["tokens"]
    return ids


def say(
    daemon: Daemon, prompt: list[int], n: int = 8, **fields: Any
) -> tuple[list[int], str, dict[str, int]]:
    """(token ids of the greedy reply, session, where the prompt's tokens came from)."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": n, "temperature": 0}
    body |= {"ignore_eos": True, "return_tokens": True, **fields}
    reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["tokens"], reply.headers["X-Towerd-Session"], reuse_of(reply.headers)


def shared(daemon: Daemon, *args: str) -> dict[str, Any]:
    """`towerctl shared ARGS --json`."""
    done = run_towerctl(daemon, "shared", *args, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def metric(daemon: Daemon, name: str) -> float:
    text = requests.get(daemon.url + "/metrics", timeout=30).text
    found = re.search(rf"^towerd_shared_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])
