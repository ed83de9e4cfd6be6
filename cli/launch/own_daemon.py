"""A daemon that runs for one command: `towerd serve` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from towerd.cli.client.api_client import ApiClient
from towerd.cli.client.target import Target, listens
from towerd.cli.launch.endpoint import POLL_S
from towerd.errors import ConfigError
from towerd.settings.config import settings

STOP_S_MAX = 120.0
"""For what is live to be written; then the process is killed."""
_COMMAND = (sys.executable, "-P", "-m", "towerd", "serve", "--port", "0")


@contextmanager
def own_daemon(
    target: Target, wanted: Mapping[str, str | None], folder: Path
) -> Iterator[ApiClient]:
    """A daemon of the named store on a free port, which ends with the block; yields a client of it once
    it is ready. wanted: settings, None: as they are set. folder: where its log goes. Raises ConfigError:
    what it said when it ended."""
    config = target.config()
    assert config.socket is not None
    places = {
        "--config": target.config_path,
        "--store-dir": target.store_dir,
        "--socket": config.socket,
        **{settings()[name].flags[0]: value for name, value in wanted.items()},
    }
    words = [str(word) for pair in places.items() if pair[1] is not None for word in pair]
    log = folder / "daemon.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*_COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # keys that the terminal turns into signals are the agent's
        )
    try:
        yield _ready(process, config.socket, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], socket: Path, log: Path) -> ApiClient:
    client: ApiClient | None = None
    while client is None or not client.is_ready():
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            said = lines[-1].removeprefix("Error: ") if lines else "It said nothing."
            raise ConfigError(
                f"No daemon was running, and the one that this command started has ended: {said}"
            )
        if client is None and listens(socket):
            client = ApiClient.at_socket(socket)
        time.sleep(POLL_S)
    return client
