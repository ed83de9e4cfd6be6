"""Azurite, Microsoft's emulator of Azure's blob storage, or a reason to skip the test."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import pytest
import requests
from waiting import until

PROGRAM_VARIABLE = "TOWERD_AZURITE"
"""Where `azurite-blob` is, unless it is on the path: npm install azurite."""
_ACCOUNT = "devstoreaccount1"
_KEY = (  # the one that every Azurite has
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_CONTAINER = "chats"
_VERSION = "2021-08-06"


@dataclass(frozen=True, slots=True)
class AzureServer:
    """A server that runs."""

    url: str
    env: Mapping[str, str]


@contextmanager
def azure_server(folder: Path) -> Iterator[AzureServer]:
    """A server with one container. Skips the test where Azurite is not installed."""
    program = os.environ.get(PROGRAM_VARIABLE) or shutil.which("azurite-blob")
    if program is None:
        pytest.skip(f"Azurite is not installed: npm install azurite, and {PROGRAM_VARIABLE}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    options = ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    server = subprocess.Popen([program, *where, *options], stdout=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    try:
        until(lambda: _made(endpoint))
        env = {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
            "AZURE_ALLOW_HTTP": "true",
        }
        yield AzureServer(f"az://{_CONTAINER}", env)
    finally:
        server.terminate()
        server.wait(30)


def _made(endpoint: str) -> bool:
    """Whether the server has made the container, which obstore cannot ask for."""
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": _VERSION}
    signed = (
        "PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
        f"/{_ACCOUNT}/{_ACCOUNT}/{_CONTAINER}\nrestype:container"
    )
    digest = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{endpoint}/{_CONTAINER}?restype=container"
    try:
        return requests.put(url, headers=headers, timeout=10).status_code == 201
    except requests.ConnectionError:
        return False
